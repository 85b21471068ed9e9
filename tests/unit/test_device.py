"""What MLX says of its device decides, not which packages are installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import mlx.core as mx
import pytest
from icehouse_server.device import Backend, Device, find_device

GIB = 1 << 30


def told(
    monkeypatch: pytest.MonkeyPatch, *, device: object, has_metal: bool, info: Mapping[str, object]
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    monkeypatch.setattr(mx, "device_info", lambda: dict(info))


def test_a_mac_without_metal_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    told(monkeypatch, device=mx.cpu, has_metal=False, info={"architecture": "arm64"})
    device = find_device()
    assert device == Device("arm64", Backend.CPU)
    assert (device.is_gpu, device.runs_ahead) == (False, False)
    assert not device.compiles_at_first_use


def test_a_build_with_cuda_is_a_gpu_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    info = {"device_name": "H200", "total_memory": 100 * GIB, "free_memory": 100 * GIB}
    told(monkeypatch, device=mx.gpu, has_metal=False, info=info)
    device = find_device()
    assert device == Device("H200", Backend.CUDA, 100 * GIB, 90 * GIB)
    assert (device.is_gpu, device.runs_ahead) == (True, True)
    assert device.compiles_at_first_use


def test_a_mac_uses_what_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {
        "device_name": "M4",
        "memory_size": 64 * GIB,
        "max_recommended_working_set_size": 50 * GIB,
        "max_buffer_length": 36 * GIB,
    }
    told(monkeypatch, device=mx.gpu, has_metal=True, info=info)
    device = find_device()
    assert device == Device("M4", Backend.METAL, 50 * GIB, 45 * GIB, 36 * GIB)
    assert device.runs_ahead


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        pytest.param({"total_memory": 80 * GIB, "free_memory": 79 * GIB}, 72 * GIB, id="nearly empty"),
        pytest.param({"total_memory": 80 * GIB, "free_memory": 30 * GIB}, 29 * GIB, id="another server"),
        pytest.param({"total_memory": 80 * GIB, "free_memory": GIB // 2}, GIB // 4, id="nearly full"),
        pytest.param({"total_memory": 80 * GIB}, 72 * GIB, id="free memory not told"),
        pytest.param({"free_memory": 0, "total_memory": 0}, None, id="nothing told"),
        pytest.param({}, None, id="no keys"),
    ],
)
def test_others_memory_is_left_to_them(info: Mapping[str, int], expected: int | None) -> None:
    assert Device.of(Backend.CUDA, info).free_bytes == expected
