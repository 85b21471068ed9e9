"""The house as it is composed: which thread touches MLX, and what a caller may hear."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import server_service_pb2
from icehouse_server.device import Backend, Device, find_device

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
    device = find_device() if on_cpu else Device.of(Backend.METAL, {"memory_size": 1 << 30})
    callers = watch_mlx(monkeypatch)
    async with whole_server(
        folder, tmp_path / "blocks", device=device, cache__block_token_count=16
    ) as served:
        ask = messages.GenerateRequest(prompt={"text": "Once upon a time " * 8}, max_output_tokens=3)
        for _ in range(2):
            await served.inference.Generate(ask)
        stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    assert {"eval", "set_cache_limit", "clear_streams"} <= set(callers)
    assert set.union(*callers.values()) == {"inference"}, {
        name: threads for name, threads in callers.items() if threads != {"inference"}
    }
    assert 0 < stats.cache.ram.limit_bytes < stats.engine.memory_limit_bytes
