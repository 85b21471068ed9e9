"""How the model is run here: what the machine says, and what the settings force."""

from __future__ import annotations

import pytest
from icehouse_server.bootstrap import server
from icehouse_server.config import Config, EngineConfig
from icehouse_server.engine.runner.forward import Attention


@pytest.mark.parametrize("on_cpu", [True, False])
def test_passes_run_ahead_where_the_device_computes_on_its_own(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """On Metal and CUDA; the dispatch of MLX's CPU build waits."""
    monkeypatch.setattr(server, "runs_on_cpu", lambda: on_cpu)
    assert server.runner_settings(Config()).is_pipelined is not on_cpu


@pytest.mark.parametrize("attention", [each.value for each in Attention])
def test_a_setting_forces_how_rows_attend(attention: str) -> None:
    settings = server.runner_settings(Config(engine=EngineConfig(attention=attention)))
    assert settings.attention is Attention(attention)
    assert server.runner_settings(Config()).attention is Attention.AUTO


def test_memory_is_not_wired_unless_asked_for() -> None:
    """Wired memory is what macOS kernel panics under MLX were traced to (mlx issue 3186)."""
    assert not server.runner_settings(Config()).is_memory_wired
    assert server.runner_settings(Config(engine=EngineConfig(wired_memory=True))).is_memory_wired
