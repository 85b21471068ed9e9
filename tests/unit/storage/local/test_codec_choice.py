"""Whether blocks are stored in planes follows what reads have shown, and not every read at once."""

from __future__ import annotations

import pytest
from icehouse_server.storage.local.codec_choice import NO_RATES, CodecChoice, ReadRates
from icehouse_server.storage.storage_settings import Codec

SLOW_DISK = ReadRates(disk_bytes_per_s=1e9, decode_bytes_per_s=3e9)
FAST_DISK = ReadRates(disk_bytes_per_s=9e9, decode_bytes_per_s=3e9)


def told(choice: CodecChoice, rates: ReadRates, *, count: int = 20) -> bool:
    for _ in range(count):
        choice.note(rates)
    return choice.has_planes


def test_the_choice_follows_the_faster_of_disk_and_decoder() -> None:
    choice = CodecChoice(Codec.AUTO)
    assert choice.has_planes, "nothing is known yet"
    assert not told(choice, FAST_DISK)
    assert told(choice, SLOW_DISK)


@pytest.mark.parametrize("rates", [NO_RATES, ReadRates(9e9, 0.0), ReadRates(0.0, 1e9)])
def test_without_both_rates_nothing_changes(rates: ReadRates) -> None:
    choice = CodecChoice(Codec.AUTO)
    assert told(choice, rates)


@pytest.mark.parametrize(("codec", "has_planes"), [(Codec.RAW, False), (Codec.PLANES, True)])
def test_a_fixed_codec_stays(codec: Codec, has_planes: bool) -> None:
    for rates in (FAST_DISK, SLOW_DISK):
        assert told(CodecChoice(codec), rates) is has_planes


def test_one_quick_read_does_not_change_it() -> None:
    choice = CodecChoice(Codec.AUTO)
    told(choice, SLOW_DISK)
    assert told(choice, FAST_DISK, count=1) and not told(choice, FAST_DISK, count=5)


def test_rates_that_are_about_equal_leave_it_as_it_is() -> None:
    for has_planes, before in ((True, SLOW_DISK), (False, FAST_DISK)):
        choice = CodecChoice(Codec.AUTO)
        told(choice, before)
        assert told(choice, ReadRates(1e9, 1.1e9), count=50) is has_planes


def test_it_reports_the_decoder() -> None:
    choice = CodecChoice(Codec.RAW)
    assert choice.decode_bytes_per_s == 0.0
    told(choice, SLOW_DISK)
    assert choice.decode_bytes_per_s == pytest.approx(3e9)
