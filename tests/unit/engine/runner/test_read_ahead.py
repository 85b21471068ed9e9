"""Files are read on a thread of their own, from the first question on, and no further than is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.engine.runner import model_loader, read_ahead
from icehouse_server.engine.runner.read_ahead import WeightReadAhead

from tests.fixtures.patience import BOUND_S


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 10)
    monkeypatch.setattr(read_ahead, "_AHEAD_BYTES", 20)
    made = [tmp_path / name for name in ("a", "b")]
    for file in made:
        file.write_bytes(bytes(50))
    return made


def until_has(ahead: WeightReadAhead, size_bytes: int) -> None:
    asked = threading.Event()
    for _ in range(int(BOUND_S * 100)):
        if ahead.has(size_bytes):
            return
        asked.wait(0.01)
    raise AssertionError(f"{size_bytes} bytes never came")


def test_it_reads_what_is_asked_for_and_a_bounded_part_of_the_rest(files: list[Path]) -> None:
    with WeightReadAhead(files) as ahead:
        until_has(ahead, 15)
        assert ahead._read_bytes < 15 + 20 + 10
        until_has(ahead, 100)
        until_has(ahead, 1000)  # there is no more: whoever asks goes on
    ahead._thread.join(BOUND_S)
    assert not ahead._thread.is_alive()


def test_it_reads_some_slices_ahead_of_what_is_loaded_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least, or the disk would be idle while one is loaded; all at once would take a processor from
    what others compute."""
    slice_bytes = model_loader._SLICE_BYTES
    file = tmp_path / "weights"
    with file.open("wb") as weights:
        weights.truncate(16 * slice_bytes)
    rests = threading.Event()
    with WeightReadAhead([file]) as ahead:
        wait_for = ahead._changed.wait_for

        def note_and_wait(may_go_on: Callable[[], bool]) -> bool:
            if not may_go_on() or ahead._read_bytes >= 8 * slice_bytes:
                rests.set()
            return wait_for(may_go_on)

        monkeypatch.setattr(ahead._changed, "wait_for", note_and_wait)
        ahead.has(slice_bytes)
        assert rests.wait(BOUND_S)
        assert 2 * slice_bytes <= ahead._read_bytes <= 6 * slice_bytes


def test_the_thread_ends_with_the_block_and_where_a_file_cannot_be_read(files: list[Path]) -> None:
    with WeightReadAhead(files) as left:
        until_has(left, 10)
    left._thread.join(BOUND_S)
    assert not left._thread.is_alive(), "it is left in the middle"
    files[0].unlink()
    with WeightReadAhead(files) as broken:
        until_has(broken, 100)


def test_nobody_asks_and_nothing_is_read(files: list[Path]) -> None:
    with WeightReadAhead(files) as ahead:
        pass
    assert ahead._thread.ident is None
