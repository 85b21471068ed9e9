"""In-flight prefixes: tokens that a running prefill will complete, so that others wait instead of computing.

Inference thread only. A prefill leads every block of its input that it has yet to compute, the tail
included. A request whose prompt begins like it follows: it waits until the last block that both share is
captured, or the leader ends, and is then planned. Where the two diverge inside a block, the leader is asked
to stop there and capture a tail (`Sequence.capture_points`), so that the follower computes only the rest.

A leader that decodes may still hold the tail of its input in its own caches, computed but not captured
(`CacheController.capture_input`). Nobody waits for such a tail; it is cut as soon as a request shares it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ReadSequence

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.tiers.matching import common_prefix
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings

_FOLLOW_LIMIT = 3
"""Leaders that one request follows at most, one after the other."""
_CANDIDATE_LIMIT = 16
"""Led blocks with the same parent that a prompt's block is compared with token by token."""
_CAPTURE_POINT_LIMIT = 8
"""Tails that one leader leaves for others; each ends a chunk."""
_LEAST_TAIL_SHARE = 4
"""Waiting for a tail shorter than a block divided by this takes longer than computing it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """A block, or the tail, of a sequence's input. A leader's blocks are those that it will complete."""

    sequence: Sequence
    parent: BlockHash
    name: BlockHash
    start: int
    stop: int

    @property
    def token_ids(self) -> TokenKeys:
        return self.sequence.input_keys[self.start : self.stop]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The beginning of a prompt that another sequence computes, and the block to wait for."""

    leader: Sequence
    block: BlockHash
    token_count: int


class InFlightPrefixes:
    """The blocks that leaders will complete, and the followers that wait for them."""

    def __init__(
        self,
        settings: PrefixSettings,
        name_of: Callable[[BlockHash, TokenKeys], BlockHash],
        *,
        can_share: bool,
        can_cut_inside: bool,
    ) -> None:
        """`name_of` is the prefix tree's."""
        self._settings = settings
        self._name_of = name_of
        self._can_share = can_share
        """Whether another prompt can start after any block; otherwise only an equal one, at the end."""
        self._can_cut_inside = can_cut_inside
        """Whether another prompt can start inside a block."""
        self._led: dict[BlockHash, _Block] = {}
        self._led_below: dict[BlockHash, dict[BlockHash, _Block]] = {}
        """The same by parent, without the tails at capture points."""
        self._followers: dict[BlockHash, list[Sequence]] = {}
        self._follow_counts: Counter[SequenceId] = Counter()
        self._ready: list[Sequence] = []

    def lead(self, sequence: Sequence, root: BlockHash) -> None:
        """Record that a sequence will compute the blocks of its input that it has not reused."""
        # Computing short inputs takes less time than waiting for them.
        if sequence.is_prefilled or sequence.prefill_target < self._settings.min_reuse_token_count:
            return
        blocks = self._blocks(sequence, root)
        for block in blocks[len(sequence.chain) :] if self._can_share else blocks[-1:]:
            if block.name not in self._led:
                self._led[block.name] = block
                self._led_below.setdefault(block.parent, {})[block.name] = block

    def lead_load(self, sequence: Sequence, names: ReadSequence[BlockHash]) -> None:
        """Record that a sequence reads these blocks from SSD; it promotes them if others follow."""
        for name in names:
            if name not in self._led:
                self._led[name] = _Block(sequence, name, name, 0, 0)

    def has_followers(self, sequence: Sequence) -> bool:
        """Whether anybody waits for what this sequence leads."""
        return any(self._followers.get(name) for name in self._led_by(sequence))

    def shared(self, sequence: Sequence, root: BlockHash) -> SharedPrefix | None:
        """Return the beginning that another sequence computes; None after `_FOLLOW_LIMIT` waits."""
        if not self._led or self._follow_counts[sequence.sequence_id] >= _FOLLOW_LIMIT:
            return None
        blocks = self._blocks(sequence, root)
        for block in reversed(blocks if self._can_share else blocks[-1:]):
            led = self._led.get(block.name)
            if led is not None:
                return SharedPrefix(led.sequence, block.name, block.stop)
            inside = self._shared_inside(block) if self._can_share else None
            if inside is not None:
                return inside
        return None

    def follow(self, sequence: Sequence, shared: SharedPrefix) -> None:
        """Have a sequence wait for the last block that it shares."""
        self._followers.setdefault(shared.block, []).append(sequence)
        self._follow_counts[sequence.sequence_id] += 1

    def complete(self, names: ReadSequence[BlockHash]) -> None:
        """Record that blocks were completed: the sequences that wait for them are ready."""
        for name in names:
            block = self._led.pop(name, None)
            siblings = self._led_below.get(block.parent) if block is not None else None
            if block is not None and siblings is not None:
                siblings.pop(name, None)
                if not siblings:
                    del self._led_below[block.parent]
            self._ready += self._followers.pop(name, [])

    def withdraw(self, sequence: Sequence) -> None:
        """Record that a leader stops: its followers are ready, with the blocks captured so far."""
        self.complete(self._led_by(sequence))
        sequence.capture_points.clear()

    def forget(self, sequence: Sequence) -> None:
        """Record that a sequence ended: it leads and follows nobody."""
        self.withdraw(sequence)
        self._follow_counts.pop(sequence.sequence_id, None)
        for waiting in self._followers.values():
            if sequence in waiting:
                waiting.remove(sequence)
        self._ready = [other for other in self._ready if other is not sequence]

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose wait has ended, each once."""
        ready, self._ready = self._ready, []
        return ready

    def _led_by(self, sequence: Sequence) -> list[BlockHash]:
        return [name for name, block in self._led.items() if block.sequence is sequence]

    def _shared_inside(self, block: _Block) -> SharedPrefix | None:
        """Return the block to wait for if a block of a prompt begins like a led one: the tail that the leader
        will capture where they diverge, or the whole block if the leader is past that point."""
        candidates = itertools.islice(self._led_below.get(block.parent, {}).values(), _CANDIDATE_LIMIT)
        counted = [(common_prefix(led.token_ids, block.token_ids), led) for led in candidates]
        if not counted:
            return None
        count, led = max(counted, key=lambda pair: pair[0])
        point = led.start + count
        least_count = max(1, self._settings.block_token_count // _LEAST_TAIL_SHARE)
        if count < least_count or point < self._settings.min_reuse_token_count:
            return None
        leader = led.sequence
        if point == led.stop:
            return SharedPrefix(leader, led.name, point)
        tail = self._name_of(led.parent, led.token_ids[:count])
        if point not in leader.capture_points:
            is_ahead = point > leader.processed_token_count
            if not is_ahead or len(leader.capture_points) >= _CAPTURE_POINT_LIMIT:
                return SharedPrefix(leader, led.name, point) if self._can_cut_inside else None
            leader.capture_points.append(point)
        if tail not in self._led:
            # New, or captured by an earlier leader: followers must also be ready when this leader ends.
            self._led[tail] = _Block(leader, led.parent, tail, led.start, point)
        return SharedPrefix(leader, tail, point)

    def _blocks(self, sequence: Sequence, root: BlockHash) -> list[_Block]:
        """Return the blocks of the input before its last token, in order, the tail last."""
        stop, size = sequence.prefill_target, self._settings.block_token_count
        blocks: list[_Block] = []
        for start in range(0, stop, size):
            parent = blocks[-1].name if blocks else root
            end = min(start + size, stop)
            name = self._name_of(parent, sequence.input_keys[start:end])
            blocks.append(_Block(sequence, parent, name, start, end))
        return blocks
