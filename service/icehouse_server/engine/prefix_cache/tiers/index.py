"""Prefix index: which blocks are known, in which tier, and what a prompt can reuse of them.

Inference thread only, pure data, no mlx: a block's arrays are an opaque `Region` with a size.
The chained hash makes a flat dict the prefix tree. A short RAM hit never hides a longer SSD hit,
because both tiers live in the same entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from icehouse_server.domain.blocks import RegionKind, block_hash
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry, Spilling
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.storage.record import BlockRecord

_CANDIDATE_LIMIT = 512
"""Children of one block that are compared token by token for a match that ends inside one."""

_UNREAD_LIMIT = 8
"""Blocks of unknown tokens that are looked into for one prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A chain of known blocks that a prompt begins with; the last may be used in part."""

    entries: tuple[Entry, ...]
    token_count: int
    """Tokens of the prompt covered; inside the last entry when it is used in part."""
    known_token_count: int
    """Tokens that match at all, before regions and checkpoints are asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class IndexRules:
    """What may be reused of a block, and how blocks are named."""

    facts: CacheFacts
    block_token_count: int
    name_secret: bytes = dataclasses.field(default=b"", repr=False)
    """What blocks are named under besides their tokens; none where they lie on SSD in the clear."""

    def needed_kinds(self, entry: Entry, token_count: int) -> tuple[RegionKind, ...]:
        """Regions of this entry that a restore to `token_count` tokens reads."""
        kinds = [RegionKind.KV] if self.facts.has_kv else []
        window = self.facts.window_token_count
        if window and entry.end_token_index > token_count - window:
            kinds.append(RegionKind.WINDOW)
        if self.facts.needs_checkpoint and entry.end_token_index == token_count:
            kinds.append(RegionKind.CHECKPOINT)
        return tuple(kinds)


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """A place in a prompt between two blocks: the hash so far, and the known blocks up to here."""

    parents: tuple[BlockHash, ...]
    """By that name the tenant's own blocks begin here, and those of the prefix it shares."""
    covered: int
    chain: tuple[Entry, ...]


class BlockIndex:
    """All blocks of the served fingerprint, by hash and by parent, and those on their way to SSD."""

    def __init__(self, rules: IndexRules) -> None:
        self.rules = rules
        self._entries: dict[BlockHash, Entry] = {}
        self._children: dict[BlockHash, dict[BlockHash, Entry]] = {}
        self._spilling: dict[BlockHash, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, block: BlockHash) -> Entry | None:
        """Return the entry of this hash."""
        return self._entries.get(block)

    def name_of(self, *, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """Return the name that a block with these tokens below `parent` has here, known or not."""
        return block_hash(parent=parent, token_ids=token_ids, secret=self.rules.name_secret)

    def chain_names(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """Return the names that the full blocks of these tokens have here, in order."""
        size = self.rules.block_token_count
        names: list[BlockHash] = []
        for start in range(0, len(token_ids) - size + 1, size):
            parent = names[-1] if names else root
            names.append(self.name_of(parent=parent, token_ids=token_ids[start : start + size]))
        return names

    def children(self, parent: BlockHash) -> tuple[Entry, ...]:
        """Return the known blocks that follow `parent`, oldest first."""
        return tuple(self._children.get(parent, {}).values())

    def add(self, *, parent: BlockHash, start_token_index: int, token_ids: tuple[int, ...]) -> Entry:
        """Return the entry of the block with these tokens below `parent`, made if it was not known."""
        name = self.name_of(parent=parent, token_ids=token_ids)
        entry = self._entries.get(name)
        if entry is None:
            entry = Entry(name, parent, start_token_index, len(token_ids))
            self._insert(entry)
        if entry.token_ids is None:
            entry.token_ids = token_ids
        assert entry.token_ids == token_ids, f"two blocks share the hash {name.hex()}"
        return entry

    def add_stored(self, record: BlockRecord) -> Entry:
        """Note that a block is committed on SSD."""
        entry = self._entries.get(record.hash)
        if entry is None:
            entry = Entry(record.hash, record.parent, record.start_token_index, record.token_count)
            entry.hit_count = record.hit_count
            entry.is_pinned = record.pinned
            self._insert(entry)
        sizes = {
            RegionKind.KV: record.kv_bytes,
            RegionKind.WINDOW: record.window_bytes,
            RegionKind.CHECKPOINT: record.checkpoint_bytes,
        }
        entry.ssd = {kind: size for kind, size in sizes.items() if size}
        entry.ssd_bytes = record.file_bytes
        return entry

    def forget_stored(self, block: BlockHash) -> Entry | None:
        """Note that a block is gone from SSD; return its entry when the index knew it."""
        entry = self._entries.get(block)
        if entry is not None:
            entry.ssd, entry.ssd_bytes = {}, 0
            self.discard_if_empty(entry)
        return entry

    @property
    def spilling(self) -> Collection[Entry]:
        """The blocks on their way to SSD, as many as the write queue takes, in the order they were sent."""
        return self._spilling.values()

    def begin_spill(self, entry: Entry, *, size_bytes: int) -> None:
        """Note that a block was handed over to be written; it stays known until `end_spill`."""
        assert entry.spill is None, f"{entry.hash.hex()} is on its way to SSD already"
        entry.spill = Spilling(size_bytes)
        self._spilling[entry.hash] = entry

    def end_spill(self, entry: Entry) -> Spilling | None:
        """Note that a block was written or dropped; return what was known of its way."""
        spill, entry.spill = entry.spill, None
        self._spilling.pop(entry.hash, None)
        return spill

    def superseded(self, entry: Entry) -> list[Entry]:
        """Return the shorter blocks with the same beginning that nobody pinned: this one stands for them."""
        tokens = entry.token_ids
        if tokens is None or not self.rules.facts.cuttable_inside:
            return []
        return [
            other
            for other in self.children(entry.parent)
            if other.token_count < entry.token_count
            and not other.is_pinned
            and all(entry.has(kind, with_ssd=True) for kind in (*other.ram, *other.ssd))
            and other.hash == self.name_of(parent=entry.parent, token_ids=tokens[: other.token_count])
        ]

    def discard_if_empty(self, entry: Entry) -> None:
        """Drop an entry that is in neither tier."""
        if entry.ram or entry.ssd or entry.is_spilling or self._entries.get(entry.hash) is not entry:
            return
        del self._entries[entry.hash]
        siblings = self._children[entry.parent]
        del siblings[entry.hash]
        if not siblings:
            del self._children[entry.parent]

    def match(
        self,
        *,
        root: BlockHash,
        token_ids: Sequence[int],
        token_limit: int,
        with_ssd: bool = True,
        shared_root: BlockHash | None = None,
    ) -> Match:
        """Return the longest usable chain for a prompt, of at most `token_limit` tokens.

        `root` is h0 of the fingerprint and tenant, `shared_root` that of a tenant whose blocks may stand
        for missing ones. Every entry whose tokens are known is compared token by token, so that equal
        hashes alone never make a hit.
        """
        tokens = tuple(token_ids[:token_limit])
        known = 0
        for count, entries in self._candidates(_roots(root, shared_root), tokens):
            known = known or count
            if self._is_usable(entries, count, with_ssd=with_ssd):
                return Match(entries, count, known)
        return Match((), 0, known)

    def unread_blocks(
        self,
        *,
        root: BlockHash,
        token_ids: Sequence[int],
        token_limit: int,
        shared_root: BlockHash | None = None,
    ) -> list[Entry]:
        """Return blocks on SSD that may begin like the rest of this prompt, as their tokens are not known.

        Latest first, a few only; with their token ids known a match may end inside one of them.
        """
        if not self.rules.facts.cuttable_inside:
            return []
        tokens = tuple(token_ids[:token_limit])
        level = self._levels(_roots(root, shared_root), tokens)[-1]
        if level.covered == len(tokens):
            return []
        below = [entry for parent in reversed(level.parents) for entry in self.children(parent)]
        unknown = [entry for entry in below if entry.token_ids is None and entry.ssd]
        return unknown[: -_UNREAD_LIMIT - 1 : -1]

    def known_chain(self, *, root: BlockHash, token_ids: Sequence[int]) -> tuple[Entry, ...]:
        """Return every known block that is wholly part of this prompt, in order."""
        tokens = tuple(token_ids)
        levels = self._levels((root,), tokens)
        whole = [
            entry
            for level in levels
            for entry, count in self._inside(level.parents, tokens[level.covered :])
            if count == entry.token_count
        ]
        return tuple(sorted(dict.fromkeys(whole), key=lambda entry: entry.end_token_index))

    def _candidates(
        self, roots: tuple[BlockHash, ...], tokens: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[Entry, ...]]]:
        """Yield the chains a prompt begins with and how much of it they cover, longest first."""
        for level in reversed(self._levels(roots, tokens)):
            for entry, count in self._inside(level.parents, tokens[level.covered :]):
                yield level.covered + count, (*level.chain, entry)
            # A level whose own block is unknown repeats the chain of the one before it.
            if level.chain and level.chain[-1].end_token_index == level.covered:
                yield level.covered, level.chain

    def _insert(self, entry: Entry) -> None:
        above = self._entries.get(entry.parent)
        owner_above = None if above is None else above.owner
        entry.owner = owner_above if entry.start_token_index else entry.parent
        self._entries[entry.hash] = entry
        self._children.setdefault(entry.parent, {})[entry.hash] = entry

    def _levels(self, roots: tuple[BlockHash, ...], tokens: tuple[int, ...]) -> list[_Level]:
        """Walk down the full blocks of a prompt as far as they are known.

        Without kv regions the blocks between two checkpoints hold nothing and are not known, so
        the walk then goes on to the prompt's end.
        """
        size = self.rules.block_token_count
        chain: tuple[Entry, ...] = ()
        levels = [_Level(roots, 0, chain)]
        for start in range(0, len(tokens) - size + 1, size):
            wanted = tokens[start : start + size]
            names = tuple(self.name_of(parent=parent, token_ids=wanted) for parent in levels[-1].parents)
            entry = self._best(names, wanted, chain)
            if entry is not None:
                chain = (*chain, entry)
            elif self.rules.facts.has_kv:
                break
            levels.append(_Level(names, start + size, chain))
        return levels

    def _best(
        self, names: tuple[BlockHash, ...], wanted: tuple[int, ...], chain: tuple[Entry, ...]
    ) -> Entry | None:
        """Return the block with these tokens that holds most; of equal ones the first that goes on where
        the chain is, in RAM or, behind the first gap there, on SSD."""
        found = [entry for name in names if (entry := self._entries.get(name)) is not None]
        same = [entry for entry in found if entry.token_ids in (None, wanted)]
        in_ram = len(same) > 1 and all(RegionKind.KV in entry.ram for entry in chain)
        return max(same, key=lambda e: (len({*e.ram, *e.ssd}), len(e.ram if in_ram else e.ssd)), default=None)

    def _inside(self, parents: tuple[BlockHash, ...], rest: tuple[int, ...]) -> list[tuple[Entry, int]]:
        """Return children that begin like `rest`, with how many of their tokens are wanted, longest first."""
        found = []
        for entry in (e for parent in parents for e in self.children(parent)[-_CANDIDATE_LIMIT:]):
            if entry.token_ids is None:
                tail = rest[: entry.token_count]
                is_it = len(tail) == entry.token_count and entry.hash == self.name_of(
                    parent=entry.parent, token_ids=tail
                )
                count = len(tail) if is_it else 0
            else:
                count = _common_prefix(entry.token_ids, rest)
            if count and (count == entry.token_count or self.rules.facts.cuttable_inside):
                found.append((entry, count))
        return sorted(found, key=lambda pair: -pair[1])

    def _is_usable(self, entries: tuple[Entry, ...], token_count: int, *, with_ssd: bool) -> bool:
        """Say whether a restore can be made: kv from RAM as far as it goes, from there all from SSD."""
        if self.rules.facts.needs_checkpoint and entries[-1].end_token_index != token_count:
            return False
        if not self._covers_window(entries, token_count):
            return False
        in_ram = True
        for entry in entries:
            kinds = self.rules.needed_kinds(entry, token_count)
            if not all(entry.has(kind, with_ssd=with_ssd) for kind in kinds):
                return False
            if RegionKind.KV in kinds:
                in_ram = in_ram and RegionKind.KV in entry.ram
                if not in_ram and RegionKind.KV not in entry.ssd:
                    return False
        return True

    def _covers_window(self, entries: tuple[Entry, ...], token_count: int) -> bool:
        """Say whether the blocks reach back as far as the window does; without kv a chain may have gaps."""
        window_start = max(0, token_count - self.rules.facts.window_token_count)
        covered_from = token_count
        for entry in reversed(entries):
            if covered_from <= window_start or entry.end_token_index < covered_from:
                break
            covered_from = entry.start_token_index
        return covered_from <= window_start


def _roots(own: BlockHash, shared: BlockHash | None) -> tuple[BlockHash, ...]:
    return (own,) if shared in (None, own) else (own, shared)


def _common_prefix(known: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    limit = min(len(known), len(wanted))
    if known[:limit] == wanted[:limit]:
        return limit
    return next(i for i in range(limit) if known[i] != wanted[i])
