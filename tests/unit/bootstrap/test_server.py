"""How the model is run here: what the machine says, and what the settings force."""

from __future__ import annotations

import pytest
from icehouse_server.bootstrap import composition as server
from icehouse_server.bootstrap import machine
from icehouse_server.config import Config, EngineConfig
from icehouse_server.device import Backend, Device
from icehouse_server.engine.runner.forward.splits import Attention

CPU = Device("EPYC", Backend.CPU)


@pytest.mark.parametrize("backend", Backend)
def test_the_device_decides_how_passes_run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead on Metal and CUDA, whatever packages are there; the dispatch of MLX's CPU build waits."""
    monkeypatch.setattr(machine, "openblas_loaded", lambda: True)
    device, config = Device("X", backend), Config()
    on_cpu = backend is Backend.CPU
    assert server.runner_settings(config, device).is_pipelined is not on_cpu
    defaults = server.CPU_DEFAULTS if on_cpu else server.GPU_DEFAULTS
    assert server.engine_limits(config, device).running_limit == defaults.decode_batch_limit
    assert machine.weights_dtype(config.model, device) == ("float32" if on_cpu else "")
    limits = server.engine_limits(config, device)
    assert limits.most_pass_token_count == (512 if on_cpu else 8192)
    assert limits.pads_attention is (backend is Backend.CUDA)
    assert limits.prefill_grid_token_count == {Backend.CPU: 8, Backend.METAL: 16, Backend.CUDA: 64}[backend]


@pytest.mark.parametrize("attention", [each.value for each in Attention])
def test_a_setting_forces_how_rows_attend(attention: str) -> None:
    settings = server.runner_settings(Config(engine=EngineConfig(attention=attention)), CPU)
    assert settings.attention is Attention(attention)
    assert server.runner_settings(Config(), CPU).attention is Attention.AUTO


def test_memory_is_not_wired_unless_asked_for() -> None:
    """Wired memory is what macOS kernel panics under MLX were traced to (mlx issue 3186)."""
    assert not server.runner_settings(Config(), CPU).is_memory_wired
    assert server.runner_settings(Config(engine=EngineConfig(wired_memory=True)), CPU).is_memory_wired
