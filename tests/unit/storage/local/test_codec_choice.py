"""Whether blocks are stored in planes follows what reads have shown, and not every read at once."""

from __future__ import annotations

import pytest
from icehouse_server.storage.local.codec_choice import NO_RATES, CodecChoice, ReadRates, try_decoder
from icehouse_server.storage.storage_settings import Codec

SLOW_DISK = ReadRates(disk_bytes_per_s=1e9, decode_bytes_per_s=3e9)
FAST_DISK = ReadRates(disk_bytes_per_s=9e9, decode_bytes_per_s=3e9)


def choice_of(codec: Codec) -> CodecChoice:
    return CodecChoice(codec, tried_bytes_per_s=3e9)


def told(choice: CodecChoice, rates: ReadRates, *, count: int = 20) -> bool:
    for _ in range(count):
        choice.note(rates)
    return choice.has_planes


def test_the_choice_follows_the_faster_of_disk_and_decoder() -> None:
    choice = choice_of(Codec.AUTO)
    assert not choice.has_planes, "nothing is known yet"
    assert not told(choice, FAST_DISK)
    assert told(choice, SLOW_DISK)
    assert not told(choice, FAST_DISK)


@pytest.mark.parametrize("rates", [NO_RATES, ReadRates(0.0, 1e9)])
def test_without_the_disks_rate_nothing_changes(rates: ReadRates) -> None:
    assert not told(choice_of(Codec.AUTO), rates)


@pytest.mark.parametrize(("disk_bytes_per_s", "has_planes"), [(1e9, True), (9e9, False)])
def test_before_a_read_in_planes_the_decoders_trial_counts(disk_bytes_per_s: float, has_planes: bool) -> None:
    assert told(choice_of(Codec.AUTO), ReadRates(disk_bytes_per_s, 0.0)) is has_planes


def test_the_trial_grows_with_the_readers() -> None:
    assert try_decoder(reader_count=2) > 0.0
    assert try_decoder(reader_count=64) > try_decoder(reader_count=1)


@pytest.mark.parametrize(("codec", "has_planes"), [(Codec.RAW, False), (Codec.PLANES, True)])
def test_a_fixed_codec_stays(codec: Codec, has_planes: bool) -> None:
    for rates in (FAST_DISK, SLOW_DISK):
        assert told(choice_of(codec), rates) is has_planes


def test_one_quick_read_does_not_change_it() -> None:
    choice = choice_of(Codec.AUTO)
    told(choice, SLOW_DISK)
    assert told(choice, FAST_DISK, count=1) and not told(choice, FAST_DISK, count=5)


def test_rates_that_are_about_equal_leave_it_as_it_is() -> None:
    for has_planes, before in ((True, SLOW_DISK), (False, FAST_DISK)):
        choice = choice_of(Codec.AUTO)
        told(choice, before)
        assert told(choice, ReadRates(1e9, 1.1e9), count=50) is has_planes


def test_it_reports_the_decoder() -> None:
    choice = choice_of(Codec.RAW)
    assert choice.decode_bytes_per_s == 0.0
    told(choice, SLOW_DISK)
    assert choice.decode_bytes_per_s == pytest.approx(3e9)
