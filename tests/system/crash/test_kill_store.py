"""kill -9 after every step of what changes a cache directory: replace, purge, key change, a full disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.system.crash.store_process import (
    Scenario,
    change_key,
    check_filled,
    check_key,
    check_purged,
    check_replaced,
    fill,
    is_killed,
    prepare,
    purge,
    replace,
)


def lives(tmp_path: Path, scenario: Scenario) -> Iterator[Path]:
    """Yield a directory for every step after which a process that played the scenario was killed."""
    for kill_after in itertools.count(1):
        directory = tmp_path / str(kill_after)
        prepare(directory)
        if not is_killed(scenario, directory, kill_after):
            assert kill_after > 4, "the scenario has hardly a step"
            return
        yield directory
        assert kill_after < 400


def test_killed_while_a_richer_block_replaces_a_poorer_one(tmp_path: Path) -> None:
    sizes = {check_replaced(directory) for directory in lives(tmp_path, replace)}
    assert len(sizes) == 2, "no kill came before the new name, or none after it"


def test_killed_while_everything_is_purged(tmp_path: Path) -> None:
    for directory in lives(tmp_path, purge):
        check_purged(directory)


def test_killed_while_the_key_is_changed(tmp_path: Path) -> None:
    assert {check_key(directory) for directory in lives(tmp_path, change_key)} == {True, False}


def test_killed_on_a_full_disk(tmp_path: Path) -> None:
    for directory in lives(tmp_path, fill):
        check_filled(directory)
