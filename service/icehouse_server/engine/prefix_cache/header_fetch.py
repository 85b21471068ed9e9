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
from icehouse_server.storage.loads import HeadRequest, HeadsRead, LoadId


class HeaderFetches:
    """Prompts that wait for the first inventory, and questions for headers that are under way."""

    def __init__(self, cache: PrefixCache, *, load_ids: Iterator[int]) -> None:
        self._cache = cache
        self._load_ids = load_ids
        self._waiting: dict[LoadId, Sequence] = {}
        self._asked: set[SequenceId] = set()
        self._is_inventory_due = cache.storage is not None
        self._early: list[Sequence] = []

    def ask(self, sequence: Sequence) -> bool:
        """Let a prompt wait for what its plan needs to know; False when that is known, or was asked for."""
        cache = self._cache
        if sequence.sequence_id in self._asked:
            self._asked.discard(sequence.sequence_id)
            return False
        if cache.storage is None or not cache.may_read(sequence):
            return False
        if self._is_inventory_due:
            # The model was loaded before the directory was read: a moment now spares a whole prefill.
            self._early.append(sequence)
            return True
        prompt = sequence.input_token_ids
        root = cache.root(sequence.request.scope)
        unread_blocks = cache.index.unread_blocks(
            root=root,
            token_ids=prompt,
            token_limit=len(prompt) - 1,
            shared_root=cache.shared_root(sequence.request.shared_scope),
        )
        if not unread_blocks:
            return False
        load_id = LoadId(next(self._load_ids))
        if not cache.storage.read_heads(HeadRequest(load_id, tuple(entry.hash for entry in unread_blocks))):
            return False
        self._asked.add(sequence.sequence_id)
        self._waiting[load_id] = sequence
        return True

    @property
    def is_inventory_due(self) -> bool:
        """Whether nobody knows yet what the SSD holds."""
        return self._is_inventory_due

    def take_inventory(self) -> list[Sequence]:
        """Note that the blocks on SSD are known; return the sequences that waited for them."""
        early, self._early = self._early, []
        self._is_inventory_due = False
        return early

    def met(self, outcome: HeadsRead) -> list[Sequence]:
        """Take headers in; return the sequence that can be planned now."""
        for header in outcome.headers:
            entry = self._cache.index.get(header.hash)
            if entry is not None and entry.token_ids is None:
                entry.token_ids = header.token_ids
        sequence = self._waiting.pop(outcome.load_id, None)
        return [sequence] if sequence is not None else []

    def abandon(self) -> list[Sequence]:
        """Return all that wait; no answer will come any more, and a late one finds nobody."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting + self.take_inventory()

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone; its answer will find it ended."""
        self._asked.discard(sequence.sequence_id)
