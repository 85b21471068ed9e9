"""Files that settings name: read whole, or refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.small_file import read_small_file


def test_what_is_in_a_file_is_returned_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    path.chmod(0o640)
    found = read_small_file(path, limit_bytes=100)
    assert (found.content, found.mode) == (b"x" * 100, 0o640)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_small_file(tmp_path / "link").content == b"x"


PLACED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "too long": lambda path: path.write_bytes(b"x" * 101),
    "nothing": lambda path: None,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("place", PLACED.values(), ids=list(PLACED))
def test_anything_else_is_refused_at_once(tmp_path: Path, place: Callable[[Path], object]) -> None:
    place(tmp_path / "file")
    with pytest.raises(OSError) as refused:
        read_small_file(tmp_path / "file", limit_bytes=100)
    assert refused.value.strerror


def test_what_becomes_a_pipe_between_the_look_and_the_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = tmp_path / "file", os.stat
    path.write_bytes(b"x")

    def look_then_swap(looked_at: Path) -> os.stat_result:
        info = look(looked_at)
        path.unlink()
        os.mkfifo(path)
        return info

    monkeypatch.setattr(os, "stat", look_then_swap)
    with pytest.raises(OSError, match="plain file"):
        read_small_file(path)
