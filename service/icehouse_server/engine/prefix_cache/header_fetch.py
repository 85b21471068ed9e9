"""Header fetches: token ids of blocks that only the SSD knows whole, so that a prompt may match inside one.

After a restart the index has every block's name but not its tokens. Before a prompt is planned, the
headers of the few blocks that may begin like its rest are read, each once per process. Inference
thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.timeouts import StorageTimeouts
from icehouse_server.storage.loads import HeadsRead, LoadId


@dataclasses.dataclass(frozen=True, slots=True)
class _Wait:
    """A prompt that waits since a reading of `Clock.monotonic`."""

    sequence: Sequence
    since: float

    @property
    def token_count(self) -> int:
        return len(self.sequence.input_token_ids)


class HeaderFetches:
    """Prompts that wait for the first inventory, or for headers that are being read."""

    def __init__(
        self, cache: PrefixCache, clock: Clock, *, load_ids: Iterator[int], timeouts: StorageTimeouts
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._load_ids = load_ids
        self._timeouts = timeouts
        self._waiting: dict[LoadId, _Wait] = {}
        self._asked: set[SequenceId] = set()
        self._early: list[_Wait] = []
        self._waits_for_inventory = True
        """False once it has kept a prompt waiting for too long: nobody else waits for it then."""

    def ask(self, sequence: Sequence) -> bool:
        """Let a prompt wait for what its plan needs to know; False when that is known, or was asked for."""
        if sequence.sequence_id in self._asked:
            self._asked.discard(sequence.sequence_id)
            return False
        if self._cache.is_inventory_due and self._waits_for_inventory:
            # The model was loaded before the directory was read: a moment now spares a whole prefill.
            self._early.append(_Wait(sequence, self._clock.monotonic()))
            return True
        load_id, request = LoadId(next(self._load_ids)), sequence.request
        if not self._cache.ask_headers(
            load_id, sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope
        ):
            return False
        self._asked.add(sequence.sequence_id)
        self._waiting[load_id] = _Wait(sequence, self._clock.monotonic())
        return True

    def take_early(self) -> list[Sequence]:
        """The blocks on SSD are known: return the sequences that waited for them."""
        early, self._early = self._early, []
        return [wait.sequence for wait in early]

    def met(self, outcome: HeadsRead) -> list[Sequence]:
        """Take headers in; return the sequence that can be planned now."""
        self._cache.learn_headers(outcome.headers)
        wait = self._waiting.pop(outcome.load_id, None)
        return [wait.sequence] if wait is not None else []

    def give_up(self) -> list[Sequence]:
        """Return the sequences that have waited for too long; they are planned with what is known."""
        given_up: list[Sequence] = []
        for load_id, wait in list(self._waiting.items()):
            if self._timeouts.has_expired(since=wait.since, token_count=wait.token_count, load_id=load_id):
                del self._waiting[load_id]
                self._timeouts.abandon(load_id)
                given_up.append(wait.sequence)
        if any(self._timeouts.has_expired(since=w.since, token_count=w.token_count) for w in self._early):
            self._waits_for_inventory = False
            given_up += self.take_early()
        return given_up

    def abandon(self) -> list[Sequence]:
        """Return all that wait; no answer will come any more, and a late one finds nobody."""
        waiting = [wait.sequence for wait in self._waiting.values()]
        self._waiting.clear()
        return waiting + self.take_early()

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone; its answer will find it ended."""
        self._asked.discard(sequence.sequence_id)
