"""Plays stories by seed, on a memory file system if there is one: no story is about a medium's speed."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from tests.system.sim.scenario import Scenario

_MEMORY = Path("/dev/shm")


class Story(Protocol):
    """All that happens to a server by one seed."""

    log: list[str]

    @property
    def seen(self) -> Counter[str]: ...
    def play(self) -> None: ...


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the server's log: injected failures are expected, and a story has its own log."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def play(
    seeds: Iterable[int], *, is_told: bool = False, make: Callable[[int, Path], Story] = Scenario
) -> Counter[str]:
    """Play stories one after the other and return what happened in them; raises `SimulationFailed`."""
    base = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
    seen: Counter[str] = Counter()
    with _quiet():
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="icehouse-sim-", dir=base) as folder:
                story = make(seed, Path(folder))
                try:
                    story.play()
                finally:
                    if is_told:
                        print("\n".join(story.log))
                seen += story.seen
    return seen
