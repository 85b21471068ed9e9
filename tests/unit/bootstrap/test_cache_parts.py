"""Parts of the cache that depend on the device."""

from __future__ import annotations

import pytest
from icehouse_server.bootstrap.cache_parts import codec_on, measured_on
from icehouse_server.config import CacheConfig
from icehouse_server.device import Backend, Device
from icehouse_server.storage.storage_settings import Codec


@pytest.mark.parametrize("backend", Backend)
def test_blocks_are_compressed_by_themselves_only_where_that_takes_no_core_of_the_model(
    backend: Backend,
) -> None:
    device = Device("d", backend)
    assert codec_on(device, Codec.AUTO) is (Codec.AUTO if device.is_gpu else Codec.RAW)
    for chosen in (Codec.RAW, Codec.PLANES):
        assert codec_on(device, chosen) is chosen


def test_rates_hold_for_one_machine_device_and_codec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device("d", Backend.CUDA)
    here = measured_on(CacheConfig(), device)
    assert here == measured_on(CacheConfig(), Device("d", Backend.CUDA, free_bytes=1))
    others = {
        measured_on(CacheConfig(), Device("another", Backend.CUDA)),
        measured_on(CacheConfig(), Device("d", Backend.METAL)),
        measured_on(CacheConfig(codec="planes"), device),
    }
    monkeypatch.setattr("platform.node", lambda: "a name that is not UTF-8: \udcff")
    others.add(measured_on(CacheConfig(), device))
    assert all(each.isascii() for each in others)
    assert len(others) == 4 and here not in others
