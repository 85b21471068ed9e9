"""Header fetches: token ids of blocks that only the SSD knows whole, so that a prompt may match inside one.

After a restart the index has every block's name but not its tokens. Before a prompt is planned, the
headers of the few blocks that may begin like its rest are read, each once per process. Inference
thread only.
"""

from __future__ import annotations

from collections.abc import Iterator

from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.storage.loads import HeadsRead, LoadId


class HeaderFetches:
    """Prompts that wait for the first inventory, or for headers that are being read."""

    def __init__(self, cache: PrefixCache, *, load_ids: Iterator[int]) -> None:
        self._cache = cache
        self._load_ids = load_ids
        self._waiting: dict[LoadId, Sequence] = {}
        self._asked: set[SequenceId] = set()
        self._early: list[Sequence] = []

    def ask(self, sequence: Sequence) -> bool:
        """Let a prompt wait for what its plan needs to know; False when that is known, or was asked for."""
        if sequence.sequence_id in self._asked:
            self._asked.discard(sequence.sequence_id)
            return False
        if self._cache.is_inventory_due:
            # The model was loaded before the directory was read: a moment now spares a whole prefill.
            self._early.append(sequence)
            return True
        load_id, request = LoadId(next(self._load_ids)), sequence.request
        if not self._cache.ask_headers(
            load_id, sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope
        ):
            return False
        self._asked.add(sequence.sequence_id)
        self._waiting[load_id] = sequence
        return True

    def take_early(self) -> list[Sequence]:
        """The blocks on SSD are known: return the sequences that waited for them."""
        early, self._early = self._early, []
        return early

    def met(self, outcome: HeadsRead) -> list[Sequence]:
        """Take headers in; return the sequence that can be planned now."""
        self._cache.learn_headers(outcome.headers)
        sequence = self._waiting.pop(outcome.load_id, None)
        return [sequence] if sequence is not None else []

    def abandon(self) -> list[Sequence]:
        """Return all that wait; no answer will come any more, and a late one finds nobody."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting + self.take_early()

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone; its answer will find it ended."""
        self._asked.discard(sequence.sequence_id)
