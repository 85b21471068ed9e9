"""Timeouts of the SSD tier: how long the engine waits for one that may never answer (inference thread).

A disk can hang: a read that does not return, a directory that does not open. Whoever waits for it gives up
after a multiple of what computing the prompt would take, and nothing more is read until the disk has come
back from what it was asked. Slow is not hung: a load may take long as long as it comes on.
"""

from __future__ import annotations

import logging

from icehouse_server.clock import Clock
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.stats import hang_detail
from icehouse_server.storage.loads import LoadId
from icehouse_server.storage.settings import STALL_LIMIT_S

_log = logging.getLogger("icehouse.engine")

_PREFILL_FACTOR = 2.0
_LEAST_S = 1.0
_MOST_S = 5.0
"""A wait without progress is given up after twice the prompt's predicted prefill, within these bounds."""
_SLOW_S = 10.0
"""A wait that makes progress, after the predicted prefill and so many seconds more."""


class StorageTimeouts:
    """Says when a wait has lasted too long, and logs when the disk hangs and when it answers again."""

    def __init__(self, cache: PrefixCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._told_detail = ""

    def has_expired(self, *, since: float, token_count: int = 0, load_id: LoadId | None = None) -> bool:
        """Whether a wait that began at `since` (`Clock.monotonic`) is to be given up.

        `token_count` is what would be computed instead, 0 for what nobody would compute. Without a `load_id`
        no progress can be seen.
        """
        waited_s = self._clock.monotonic() - since
        prefill_s = self._cache.rates.prefill_s(token_count)
        limit_s = min(max(_PREFILL_FACTOR * prefill_s, _LEAST_S), _MOST_S) if prefill_s else _MOST_S
        storage = self._cache.storage
        silent_s = waited_s if load_id is None or storage is None else storage.silence_s(load_id)
        return min(waited_s, silent_s) >= limit_s or waited_s >= _SLOW_S + prefill_s

    @property
    def is_stalled(self) -> bool:
        """Whether the storage thread hangs, so that nothing is written, removed or counted."""
        storage = self._cache.storage
        return storage is not None and storage.stall_s >= STALL_LIMIT_S

    def abandon(self, load_id: LoadId) -> None:
        """Stop waiting for what was asked of SSD; nothing more is until the disk has come back from it."""
        storage = self._cache.storage
        if storage is not None:
            storage.abandon(load_id)
            self._cache.rates.reads_hang = storage.hung_read_count > 0

    def look(self) -> None:
        """Notice, and log, that the disk hangs or that it answers again."""
        storage = self._cache.storage
        self._cache.rates.reads_hang = storage is not None and storage.hung_read_count > 0
        detail = hang_detail(storage)
        if bool(detail) is not bool(self._told_detail):
            if detail:
                _log.error("ssd_hangs", extra={"detail": detail})
            else:
                _log.warning("ssd_answers_again")
        self._told_detail = detail
