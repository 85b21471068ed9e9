"""A start does not wait for a disk that hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.storage.digests import DigestBook
from icehouse_server.storage.files import Files, in_time

from tests.fixtures.storage.hanging import HangingFiles


def test_what_an_action_comes_to_is_handed_on() -> None:
    assert in_time(lambda: 3) == 3
    with pytest.raises(ValueError):
        in_time(lambda: int(""))


def test_an_action_that_does_not_end_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icehouse_server.storage.files.TIME_LIMIT_S", 0.01)
    goes_on, ended = threading.Event(), threading.Event()

    def wait() -> None:
        goes_on.wait()
        ended.set()

    with pytest.raises(TimeoutError, match="did not answer"):
        in_time(wait)
    goes_on.set()
    assert ended.wait(100), "nobody waits, but it goes on"


def test_its_own_timeout_is_its_own() -> None:
    def refuse() -> None:
        raise TimeoutError("from the network")

    with pytest.raises(TimeoutError, match="from the network"):
        in_time(refuse)


def test_weights_are_hashed_without_what_a_hanging_disk_keeps_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icehouse_server.storage.files.TIME_LIMIT_S", 0.01)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    book = DigestBook(str(tmp_path / "cache"), files=Files(), clock=SystemClock())
    digest = book.digest(str(weights))
    book.save()
    files = HangingFiles({"open", "create"})
    files.hang()
    try:
        hung = DigestBook(str(tmp_path / "cache"), files=files, clock=SystemClock())
    finally:
        files.go_on()
    assert hung.digest(str(weights)) == digest
