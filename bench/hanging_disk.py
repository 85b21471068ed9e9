"""A server whose cache disk hangs now and then: `python -m bench.hanging_disk serve …`, for `make soak`."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from typing import Any

from icehouse_server.cli.main import main
from icehouse_server.storage.files import Files

_READS = ("open", "read_into")
_WRITES = ("create", "write", "fsync", "fsync_dir", "rename", "unlink")
_KINDS = (_READS, _WRITES, (*_READS, *_WRITES))
_ANSWERS_S = (10.0, 40.0)
_HANGS_S = (3.0, 25.0)
"""Shorter and longer than a server waits before it gives up."""


def hang_now_and_then(*, seed: int = 0) -> None:
    """Make reads, writes or both of this process hang for a while, again and again."""
    doors = {verb: threading.Event() for verb in (*_READS, *_WRITES)}
    for verb, door in doors.items():
        door.set()
        setattr(Files, verb, _behind(door, getattr(Files, verb)))
    threading.Thread(target=_turn, args=(doors, random.Random(seed)), daemon=True).start()


def _behind(door: threading.Event, action: Any) -> Any:
    @functools.wraps(action)
    def call(*args: Any, **kwargs: Any) -> Any:
        door.wait()
        return action(*args, **kwargs)

    return call


def _turn(doors: dict[str, threading.Event], dice: random.Random) -> None:
    for number in itertools.count():
        time.sleep(dice.uniform(*_ANSWERS_S))
        hanging = _KINDS[number % len(_KINDS)]
        for verb in hanging:
            doors[verb].clear()
        time.sleep(dice.uniform(*_HANGS_S))
        for verb in hanging:
            doors[verb].set()


if __name__ == "__main__":
    hang_now_and_then()
    main()
