"""Header fetches: token ids of blocks that only the SSD knows whole, so that a prompt may match inside one.

After a restart the tree has every block's name but not its tokens. Before a prompt is planned, the
headers of the few blocks that may begin like its rest are read, each once per process. Inference
thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from icehouse_server.domain.blocks import BlockHeader
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.storage.api import Failure, Trouble


class HeaderFetches:
    """Prompts that wait for the first inventory, or for headers that are being read."""

    def __init__(self, cache: PrefixCache, *, ready: Callable[[Sequence], object]) -> None:
        """`ready` is told of a sequence that can be planned, with what is known by then."""
        self._cache = cache
        self._waits = cache.waits
        self._ready = ready
        self._asked: set[SequenceId] = set()
        self._waits_for_inventory = True
        """False once it has kept a prompt waiting for too long: nobody else waits for it then."""

    def ask(self, sequence: Sequence) -> bool:
        """Let a prompt wait for what its plan needs to know; False when that is known, or was asked for."""
        if sequence.sequence_id in self._asked:
            self._asked.discard(sequence.sequence_id)
            return False
        request, token_count = sequence.request, len(sequence.input_token_ids)

        def inventory_came(outcome: Failure | None) -> None:
            self._waits_for_inventory &= outcome is None or outcome.cause is not Trouble.TIMED_OUT
            self._ready(sequence)

        def met(outcome: tuple[BlockHeader, ...] | Failure) -> None:
            if not isinstance(outcome, Failure):
                self._cache.learn_headers(outcome)
            self._ready(sequence)

        if self._cache.is_inventory_due and self._waits_for_inventory:
            # The model was loaded before the directory was read: a moment now spares a whole prefill.
            self._waits.add(self._waits.inventory, inventory_came, token_count=token_count)
            return True
        ticket = self._cache.ask_headers(
            sequence.input_keys, scope=request.scope, shared_scope=request.shared_scope
        )
        if ticket is None:
            return False
        self._asked.add(sequence.sequence_id)
        self._waits.add(ticket, met, token_count=token_count)
        return True

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone; its answer will find it ended."""
        self._asked.discard(sequence.sequence_id)
