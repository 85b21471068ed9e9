"""Rewinding caches: tokens that were guessed are taken back, each cache by the rules of its class. Forking
them: some tokens go on in copies, which may be dropped.

Inference thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from icehouse_server.engine.kv_cache.cache_classes import Cache, Undo, class_of, is_list, leaves


def can_rewind(caches: Sequence[Cache]) -> bool:
    """Return whether tokens that were fed together can be taken back out of these caches."""
    found = list(leaves(caches))
    return bool(found) and all(class_of(leaf).can_rewind(leaf) for leaf in found)


def rewind(caches: Sequence[Cache], count: int) -> None:
    """Take the last `count` tokens back, fewer than were fed in the last pass; `can_rewind` said so."""
    if not count:
        return
    for leaf in leaves(caches):
        class_of(leaf).rewind(leaf, count)


def mark(caches: Sequence[Cache]) -> list[Undo]:
    """Remember where caches that `can_rewind`, or states, stand; for `return_to`."""
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
