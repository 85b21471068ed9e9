"""Parts of the cache that depend on the device."""

from __future__ import annotations

import pytest
from icehouse_server.bootstrap.cache_parts import codec_on
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
