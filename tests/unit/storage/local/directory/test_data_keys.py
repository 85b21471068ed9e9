"""Data keys and the master keys that open them: made once, changed, lost, damaged, crashed upon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.data_keys import find_key, open_key, restore_key, rewrap
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.faults import Crash, CrashingFiles

MINE, YOURS, THEIRS = (bytes([number]) * 32 for number in (1, 2, 3))
FILES = Files()


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    return StorePaths(str(tmp_path))


def test_a_data_key_is_made_once(paths: StorePaths) -> None:
    first = open_key(FILES, paths, master_key=MINE)
    again = open_key(FILES, paths, master_key=MINE)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.data_key == again.data_key == find_key(FILES, paths, master_key=MINE)
    assert len(first.data_key) == 32 and first.data_key not in (MINE, bytes(32))
    assert os.stat(paths.data_keys).st_mode & 0o777 == 0o600
    assert repr(first.data_key) not in repr(first), "a key may end in a log"


def test_neither_key_can_be_read_from_the_file(paths: StorePaths) -> None:
    data_key = open_key(FILES, paths, master_key=MINE).data_key
    text = Path(paths.data_keys).read_bytes()
    assert data_key.hex().encode() not in text and MINE.hex().encode() not in text


def test_another_master_key_gets_a_data_key_of_its_own(paths: StorePaths) -> None:
    mine = open_key(FILES, paths, master_key=MINE)
    assert find_key(FILES, paths, master_key=YOURS) is None
    yours = open_key(FILES, paths, master_key=YOURS)
    assert yours.is_new and yours.other_key_count == 1 and yours.data_key != mine.data_key
    back = open_key(FILES, paths, master_key=MINE)
    assert (back.data_key, back.other_key_count, back.is_new) == (mine.data_key, 1, False)


def test_changing_the_master_key_keeps_the_data_key(paths: StorePaths) -> None:
    mine = open_key(FILES, paths, master_key=MINE).data_key
    theirs = open_key(FILES, paths, master_key=THEIRS).data_key
    assert rewrap(FILES, paths, old_master_key=MINE, new_master_key=YOURS) == 1
    assert find_key(FILES, paths, master_key=MINE) is None
    assert find_key(FILES, paths, master_key=YOURS) == mine
    assert find_key(FILES, paths, master_key=THEIRS) == theirs
    before = Path(paths.data_keys).read_bytes()
    assert rewrap(FILES, paths, old_master_key=MINE, new_master_key=YOURS) == 0
    assert Path(paths.data_keys).read_bytes() == before


DAMAGES = [
    "",
    "[" * 60_000,
    "{",
    "[]",
    '{"format": "other"}',
    '{"format": "icehouse.keys.v1", "wrapped": 7}',
    '"\\ud800"',
]


@pytest.mark.parametrize("text", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_kept_aside(paths: StorePaths, text: str) -> None:
    first = open_key(FILES, paths, master_key=MINE).data_key
    good = Path(paths.data_keys).read_bytes()
    Path(paths.data_keys).write_text(text)
    assert find_key(FILES, paths, master_key=MINE) is None
    second = open_key(FILES, paths, master_key=MINE)
    assert second.is_new and second.data_key != first
    assert Path(paths.data_keys_aside()).read_text() == text
    Path(paths.data_keys).write_bytes(good)
    assert open_key(FILES, paths, master_key=MINE).data_key == first


def test_a_flipped_bit_is_another_key_and_not_a_wrong_one(paths: StorePaths) -> None:
    first = open_key(FILES, paths, master_key=MINE).data_key
    text = Path(paths.data_keys).read_text()
    digit = text.index('["') + 2
    Path(paths.data_keys).write_text(text[:digit] + ("1" if text[digit] == "0" else "0") + text[digit + 1 :])
    opened = open_key(FILES, paths, master_key=MINE)
    assert opened.is_new and opened.other_key_count == 1 and opened.data_key != first


def test_a_crash_leaves_the_old_keys_or_the_new_ones(tmp_path: Path) -> None:
    """After a crash in a change exactly one master key opens the data key; it is never lost."""
    crash_at, opened_by = 0, set()
    while crash_at < 50:
        crash_at += 1
        paths = StorePaths(str(tmp_path / str(crash_at)))
        FILES.make_dir(paths.root)
        data_key = open_key(FILES, paths, master_key=MINE).data_key
        files = CrashingFiles(crash_at)
        files.is_armed = True
        try:
            rewrap(files, paths, old_master_key=MINE, new_master_key=YOURS)
        except Crash:
            pass
        else:
            break
        found = [find_key(FILES, paths, master_key=key) for key in (MINE, YOURS)]
        assert sorted(found, key=str) == sorted([None, data_key], key=str)
        opened_by.add(found.index(data_key))
        assert rewrap(FILES, paths, old_master_key=[MINE, YOURS][found.index(data_key)], new_master_key=YOURS)
        assert find_key(FILES, paths, master_key=YOURS) == data_key
    assert opened_by == {0, 1} and crash_at < 50


def test_each_damaged_file_is_kept_for_itself(paths: StorePaths) -> None:
    for text in ("first", "second"):
        Path(paths.data_keys).write_text(text)
        open_key(FILES, paths, master_key=MINE)
        os.unlink(paths.data_keys)
    assert [Path(paths.data_keys_aside(n)).read_text() for n in (1, 2)] == ["first", "second"]


def test_a_key_file_that_is_gone_is_put_back_and_one_that_is_there_left_alone(paths: StorePaths) -> None:
    opened = open_key(FILES, paths, master_key=MINE)
    os.unlink(paths.data_keys)
    restore_key(FILES, paths, wrapped=opened.wrapped)
    assert find_key(FILES, paths, master_key=MINE) == opened.data_key
    # The key was changed meanwhile: what the old one wrapped must not come back.
    rewrap(FILES, paths, old_master_key=MINE, new_master_key=YOURS)
    restore_key(FILES, paths, wrapped=opened.wrapped)
    assert find_key(FILES, paths, master_key=MINE) is None
