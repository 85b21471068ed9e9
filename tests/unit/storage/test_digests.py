"""Digests of weight files: every byte counts, and nothing is read twice that stayed as it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.storage import digests
from icehouse_server.storage.digests import DigestBook
from icehouse_server.storage.files import Files


class LaterClock(SystemClock):
    """A start some time after the files were written."""

    def wall(self) -> float:
        return super().wall() + 60.0


def book(tmp_path: Path, clock: SystemClock | None = None) -> DigestBook:
    return DigestBook(str(tmp_path / "cache"), files=Files(), clock=clock or LaterClock())


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("size_bytes", [0, 1, 9, 10, 11, 35])
def test_it_is_over_all_bytes_and_over_their_number(
    tmp_path: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_PIECE_BYTES", 10)
    monkeypatch.setattr(digests, "_READ_BYTES", 4)
    data = bytes(range(size_bytes))
    pieces = [hashlib.sha256(data[at : at + 10]).digest() for at in range(0, size_bytes, 10)]
    expected = hashlib.sha256(size_bytes.to_bytes(8, "little") + b"".join(pieces)).hexdigest()
    assert book(tmp_path).digest(write(tmp_path / "weights", data)) == expected


def test_a_second_start_reads_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "weights", b"w" * 100)
    first = book(tmp_path)
    value = first.digest(path)
    first.save()
    second = book(tmp_path)
    assert (second.digest(path), first.read_bytes, second.read_bytes) == (value, 100, 0)
    assert os.stat(tmp_path / "cache" / "digests.json").st_mode & 0o777 == 0o600


def test_a_change_in_place_is_read_though_size_and_time_are_as_before(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    first = book(tmp_path)
    value = first.digest(write(path, b"w" * 100))
    first.save()
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(50)
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = book(tmp_path)
    assert second.digest(str(path)) != value and second.read_bytes == 100


def test_a_moved_file_and_a_link_to_it_are_known(tmp_path: Path) -> None:
    first = book(tmp_path)
    value = first.digest(write(tmp_path / "weights", b"w" * 100))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "weights")
    assert (first.digest(str(link)), first.read_bytes) == (value, 100)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    """Within a tick of the file system's clock a second change would show in none of its times."""
    path = write(tmp_path / "weights", b"w" * 100)
    first = book(tmp_path, SystemClock())
    first.digest(path)
    first.save()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "icehouse.digests.v1"}',
        '{"format": "icehouse.digests.v1", "files": [[1e999, 1, 1, 1, ""]], "claims": {}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_a_book_that_cannot_be_read_costs_a_reading(tmp_path: Path, text: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "digests.json").write_text(text)
    again = book(tmp_path)
    again.digest(write(tmp_path / "weights", b"w" * 100))
    assert again.read_bytes == 100


def test_a_directory_that_refuses_costs_a_reading_and_no_start(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    refused = book(tmp_path)
    refused.digest(write(tmp_path / "weights", b"w" * 100))
    refused.save()


def test_only_so_many_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_ENTRY_LIMIT", 2)
    first = book(tmp_path)
    paths = [write(tmp_path / f"weights{n}", bytes([n])) for n in range(3)]
    for path in (*paths, paths[0]):
        first.digest(path)
    first.save()
    again = book(tmp_path)
    for path in paths:
        again.digest(path)
    assert again.read_bytes == 1, "the one asked for longest ago is read again, and no other"
