"""Marking caches, to return to where they stood, each by the rules of its class. Forking them: some tokens go
on in copies, which may be dropped.

Inference thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from icehouse_server.engine.kv_cache.cache_classes import Cache, Undo, class_of, is_list, leaves


def mark(caches: Sequence[Cache]) -> list[Undo]:
    """Remember where caches from which tokens can be taken back, or states, stand; for `return_to`."""
    return [class_of(leaf).mark(leaf) for leaf in leaves(caches)]


def forked(caches: Sequence[Cache]) -> list[Cache]:
    """Return caches that go on from where these stand, while these stay as they are.

    Nothing is copied: of several tokens that are fed at once, what is written into shared arrays lies behind
    the last token, and all else is put in new ones. These must not be fed until the forks are dropped.
    """
    return [_forked(cache) for cache in caches]


def _forked(cache: Cache) -> Cache:
    fork = copy.copy(cache)
    if is_list(cache):
        fork.caches = type(cache.caches)(_forked(part) for part in cache.caches)
        return fork
    for name, value in getattr(cache, "__dict__", {}).items():  # those of pages have none: their table counts
        if isinstance(value, list):  # the slots of a state
            setattr(fork, name, list(value))
    return fork


def return_to(marks: Iterable[Undo]) -> None:
    """Undo every update since the marks were made."""
    for undo in marks:
        undo()
