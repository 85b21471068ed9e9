"""In-flight prefixes: blocks that a running prefill will complete, so that others wait instead of computing.

Inference thread only. A prefill leads with every full block of its input that is still to come, and the
tail at its end. A request whose own prompt goes through such a block follows: it waits until the last
block it shares is kept, or the leader ends, and is planned then. Only an equal prompt shares the tail.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadSequence

from icehouse_server.domain.blocks import block_hash
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings

_FOLLOW_LIMIT = 3
"""Leaders one request follows at most, one after the other."""


class InFlightPrefixes:
    """Who computes what, and who waits for it."""

    def __init__(self, settings: PrefixSettings, *, can_share: bool) -> None:
        self._settings = settings
        self._can_share = can_share
        """Whether another prompt can start at any block; else only an equal one, at the end."""
        self._leaders: dict[BlockHash, SequenceId] = {}
        self._led: dict[SequenceId, list[BlockHash]] = {}
        self._followers: dict[BlockHash, list[Sequence]] = {}
        self._follow_counts: dict[SequenceId, int] = {}
        self._ready: list[Sequence] = []

    def lead(self, sequence: Sequence, root: BlockHash) -> None:
        """Note that a sequence computes the blocks of its input that are not there yet."""
        # Short inputs are computed sooner than waited for.
        if sequence.is_prefilled or sequence.prefill_target < self._settings.min_reuse_token_count:
            return
        mine = [name for name in self._shareable(sequence, root) if name not in self._leaders]
        self._leaders.update(dict.fromkeys(mine, sequence.sequence_id))
        if mine:
            self._led[sequence.sequence_id] = mine

    def follow(self, sequence: Sequence, root: BlockHash) -> bool:
        """Have a sequence wait for the last block it shares with a running prefill; False for none."""
        if not self._leaders or self._follow_counts.get(sequence.sequence_id, 0) >= _FOLLOW_LIMIT:
            return False
        shared = [name for name in self._shareable(sequence, root) if name in self._leaders]
        if not shared:
            return False
        self._followers.setdefault(shared[-1], []).append(sequence)
        self._follow_counts[sequence.sequence_id] = self._follow_counts.get(sequence.sequence_id, 0) + 1
        return True

    def complete(self, names: ReadSequence[BlockHash]) -> None:
        """Note that blocks were completed; whoever waits for them is ready."""
        for name in names:
            self._leaders.pop(name, None)
            self._ready += self._followers.pop(name, [])

    def withdraw(self, sequence: Sequence) -> None:
        """The leader computes no further: its followers are ready, with what there is."""
        led = self._led.pop(sequence.sequence_id, [])
        # A block it completed may have been let go again, and another one may compute it by now.
        self.complete([name for name in led if self._leaders.get(name) == sequence.sequence_id])

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended: it leads and follows nobody."""
        self.withdraw(sequence)
        self._follow_counts.pop(sequence.sequence_id, None)
        for waiting in self._followers.values():
            if sequence in waiting:
                waiting.remove(sequence)
        self._ready = [other for other in self._ready if other is not sequence]

    def take_ready(self) -> list[Sequence]:
        """Return the sequences that need wait no longer, once."""
        ready, self._ready = self._ready, []
        return ready

    def _shareable(self, sequence: Sequence, root: BlockHash) -> list[BlockHash]:
        """Names of the blocks before the last input token, the tail's last, that its caches lack and that
        another prompt could start from."""
        stop, size = sequence.prefill_target, self._settings.block_token_count
        names: list[BlockHash] = []
        for start in range(0, stop, size):
            parent = names[-1] if names else root
            tokens = sequence.input_token_ids[start : min(start + size, stop)]
            names.append(block_hash(parent=parent, token_ids=tokens, secret=self._settings.name_secret))
        return names[len(sequence.chain) :] if self._can_share else names[-1:]
