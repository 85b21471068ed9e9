"""Files below a folder: plain ones are read up to the limit, and no link, pipe or folder leads anywhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.image_sources import image_fetcher
from icehouse_server.rpc.image_sources.image_address import FileAddress
from icehouse_server.rpc.image_sources.image_fetcher import read_file

FIELD = "prompt.chat.messages[0].parts[0].image.uri"
LIMIT = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "pictures"
    (inside / "a" / "b").mkdir(parents=True)
    (inside / "a" / "b" / "cat.png").write_bytes(b"cat")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cat.png").write_bytes(b"other")
    return inside


def read(folder: Path, *names: str) -> bytes:
    return read_file(FileAddress(str(folder), names), limit_bytes=LIMIT, field=FIELD)


def refusal(folder: Path, *names: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, *names)
    error = caught.value
    assert (error.reason, error.field) == (Reason.IMAGE_INVALID, FIELD)
    assert str(folder) not in error.message and "secret" not in error.message
    return error.message


class Os:
    """The system's calls but for some."""

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def open_count() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_file_is_read_however_deep(folder: Path) -> None:
    assert read(folder, "a", "b", "cat.png") == b"cat"
    assert read(folder / "a", "b", "cat.png") == b"cat"


def test_the_folder_itself_may_be_a_link_since_whoever_set_it_chose_it(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert read(link, "a", "b", "cat.png") == b"cat"


def link_to_a_file(place: Path, folder: Path) -> None:
    place.symlink_to(folder.parent / "secret")


def hard_link(place: Path, folder: Path) -> None:
    place.hardlink_to(folder.parent / "secret")


def link_up(place: Path, folder: Path) -> None:
    place.symlink_to("../secret")


def link_inside(place: Path, folder: Path) -> None:
    place.symlink_to("a/b/cat.png")


def pipe(place: Path, folder: Path) -> None:
    os.mkfifo(place)


def subfolder(place: Path, folder: Path) -> None:
    place.mkdir()


def listener(place: Path, folder: Path) -> None:
    here = os.open(place.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{place.name}" if os.path.exists("/proc/self/fd") else str(place))
    finally:
        os.close(here)


def nothing(place: Path, folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    "make",
    [link_to_a_file, hard_link, link_up, link_inside, pipe, subfolder, listener, nothing],
    ids=lambda m: m.__name__,
)
def test_what_is_no_plain_file_is_refused_in_the_same_words(
    folder: Path, make: Callable[[Path, Path], None]
) -> None:
    make(folder / "cat.png", folder)
    before = open_count()
    assert refusal(folder, "cat.png") == refusal(folder, "not", "there")
    assert open_count() == before


@pytest.mark.parametrize("name", ["zero", "null", "tty", "stdin"])
def test_a_device_is_not_opened(folder: Path, name: str) -> None:
    assert os.path.exists("/dev/zero")
    assert refusal(Path("/dev"), name) == refusal(folder, "not", "there")


def test_a_link_on_the_way_is_not_followed(folder: Path) -> None:
    (folder / "out").symlink_to(folder.parent / "other")
    (folder / "up").symlink_to("..")
    (folder / "here").symlink_to(".")
    expected = refusal(folder, "not", "there")
    for names in (("out", "cat.png"), ("up", "secret"), ("here", "a", "b", "cat.png")):
        assert refusal(folder, *names) == expected


def test_a_file_that_becomes_a_link_between_two_looks_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the folder may exchange a file while it is looked at."""
    place, look = folder / "cat.png", os.stat
    place.write_bytes(b"cat")

    def exchanged(name: str, **where: Any) -> os.stat_result:
        found = look(name, **where)
        if name == place.name:
            place.unlink()
            place.symlink_to(folder.parent / "secret")
        return found

    monkeypatch.setattr(image_fetcher, "os", Os(stat=exchanged))
    assert refusal(folder, "cat.png") == refusal(folder, "not", "there")


def test_a_file_beyond_the_limit_is_not_read(folder: Path) -> None:
    for size in (LIMIT, LIMIT + 1, 1 << 34):
        with (folder / "big").open("wb") as file:
            file.truncate(size)
        if size == LIMIT:
            assert read(folder, "big") == b"\0" * LIMIT
        else:
            assert f"more than {LIMIT} bytes" in refusal(folder, "big")


def test_a_file_that_grows_is_read_to_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "log").write_bytes(b"a")
    sizes: list[int] = []

    def endless(file: int, size: int) -> bytes:
        sizes.append(size)
        return b"x" * min(size, 40)

    monkeypatch.setattr(image_fetcher, "os", Os(read=endless))
    assert f"more than {LIMIT} bytes" in refusal(folder, "log")
    assert sizes == [101, 61, 21]
