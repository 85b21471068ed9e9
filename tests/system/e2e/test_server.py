"""The house as it is composed: which thread touches MLX, and what a caller may hear."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path

import icehouse_server.bootstrap.machine
import mlx.core as mx
import pytest
from icehouse.v1 import inference_service_pb2 as messages

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server


def watch_mlx(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Note for every function of MLX by which threads it is called from here on."""
    callers: dict[str, set[str]] = {}
    for name in dir(mx):
        original = getattr(mx, name)
        if name.startswith("_") or isinstance(original, type) or not callable(original):
            continue

        def noted(*args, name=name, original=original, **kwargs):
            callers.setdefault(name, set()).add(threading.current_thread().name)
            return original(*args, **kwargs)

        functools.update_wrapper(noted, original, assigned=("__name__", "__doc__"))
        monkeypatch.setattr(mx, name, noted)
    return callers


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
async def test_only_the_inference_thread_touches_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    for module in [
        m
        for name, m in sys.modules.items()
        if name.startswith(("icehouse_server.cli.", "icehouse_server.bootstrap."))
    ]:
        if hasattr(module, "runs_on_cpu"):
            monkeypatch.setattr(module, "runs_on_cpu", lambda: on_cpu)
    if not on_cpu:
        # MLX's CPU build does not say how much memory there is.
        monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "M", "memory_size": 1 << 30})
    callers = watch_mlx(monkeypatch)
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        ask = messages.GenerateRequest(text="Once upon a time " * 8, max_output_tokens=3)
        for _ in range(2):
            await served.inference.Generate(ask)
        stats = await served.inference.CacheStats(messages.CacheStatsRequest())
    assert {"device_info", "eval", "set_cache_limit"} <= set(callers)
    assert set.union(*callers.values()) == {"inference"}, {
        name: threads for name, threads in callers.items() if threads != {"inference"}
    }
    assert 0 < stats.cache.ram.limit_bytes < stats.engine.memory_limit_bytes
    assert (
        icehouse_server.bootstrap.machine.memory_limit(123)()
        == icehouse_server.bootstrap.machine.cache_limit(123)()
        == 123
    )
