"""Prefix index: which blocks are known, in which tier, and what a prompt can reuse of them.

Inference thread only, pure data, no mlx: a block's arrays are an opaque `Region` with a size.
The chained hash makes a flat dict the prefix tree. A short RAM hit never hides a longer SSD hit,
because both tiers live in the same entries. `token_ids` are token keys here (`domain.blocks`): ids, but
for the tokens of images.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from icehouse_server.domain.blocks import BlockHeader, RegionKind, join_keys, prefix_key_hashes
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.block_log import BlockLog, KvTier, Left
from icehouse_server.engine.core.block_names import BlockNames
from icehouse_server.engine.prefix_cache.tiers.children import Children
from icehouse_server.engine.prefix_cache.tiers.entry import Entry, Spilling
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.storage.api import StoredBlock

_CANDIDATE_LIMIT = 512
"""Children of one block that are compared token by token for a match that ends inside one."""

_SIZES_LIMIT = 4096
"""Different sizes of regions on SSD that are shared by the blocks that have them."""

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
    chain_count: int
    """Blocks of the descent's chain before this place."""
    names: tuple[BlockHash, ...]
    """Of the full blocks that follow in the prompt, one for each parent; none where its rest is shorter."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Descent:
    """The known full blocks of a prompt, and the places between them."""

    levels: list[_Level]
    chain: list[Entry]

    def kv_counts(self, *, with_ssd: bool) -> tuple[int, int]:
        """Return how many of the first blocks have their kv in RAM, and up to where it can be had at all:
        from RAM as far as it goes, from there all from SSD."""
        in_ram = itertools.takewhile(lambda entry: RegionKind.KV in entry.ram, self.chain)
        ram_count = sum(1 for _ in in_ram)
        if not with_ssd:
            return ram_count, ram_count
        behind = itertools.islice(self.chain, ram_count, None)
        return ram_count, ram_count + sum(
            1 for _ in itertools.takewhile(lambda entry: RegionKind.KV in entry.ssd, behind)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    """A chain that a prompt begins with: the first so many blocks of a descent, and perhaps one more."""

    token_count: int
    chain_count: int
    last: Entry | None

    def backwards(self, descent: _Descent) -> Iterator[Entry]:
        """Yield its blocks from the last to the first."""
        if self.last is not None:
            yield self.last
        for number in range(self.chain_count - 1, -1, -1):
            yield descent.chain[number]


class BlockIndex:
    """All blocks of the served fingerprint, by hash and by parent, and those on their way to SSD."""

    def __init__(self, rules: IndexRules, log: BlockLog, names: BlockNames | None = None) -> None:
        self._log = log
        self.rules = rules
        self._names = BlockNames(rules.name_secret) if names is None else names
        self._entries: dict[BlockHash, Entry] = {}
        self._children = Children()
        self._sizes: dict[tuple[int, int, int], dict[RegionKind, int]] = {}
        self._spilling: dict[BlockHash, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def latest(self, limit: int) -> Iterator[Entry]:
        """Yield at most so many blocks, those that became known last first."""
        return itertools.islice(reversed(self._entries.values()), limit)

    def get(self, block: BlockHash) -> Entry | None:
        """Return the entry of this hash."""
        return self._entries.get(block)

    def name_of(self, *, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """Return the name that a block with these tokens below `parent` has here, known or not."""
        return self._names.of(parent, tuple(token_ids))

    def chain_names(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockHash]:
        """Return the names that the full blocks of these tokens have here, in order."""
        size = self.rules.block_token_count
        names: list[BlockHash] = []
        for start in range(0, len(token_ids) - size + 1, size):
            parent = names[-1] if names else root
            names.append(self.name_of(parent=parent, token_ids=token_ids[start : start + size]))
        return names

    def children(self, parent: BlockHash, *, limit: int | None = None) -> tuple[Entry, ...]:
        """Return the known blocks that follow `parent`, the last `limit` of them, oldest first."""
        return self._children.of(parent, limit=limit)

    def reach(self, entry: Entry) -> int:
        """Return where the longest known block that follows this one ends; its own end when none does."""
        return entry.end_token_index + max(self._children.lengths(entry.hash), default=0)

    def add(self, *, parent: BlockHash, start_token_index: int, token_ids: tuple[int, ...]) -> Entry:
        """Return the entry of the block with these tokens below `parent`, made if it was not known."""
        name = self.name_of(parent=parent, token_ids=token_ids)
        entry = self._entries.get(name)
        if entry is None:
            entry = Entry(name, parent, start_token_index, len(token_ids))
            self._insert(entry)
        self.learn_tokens(entry, token_ids)
        assert entry.token_ids == token_ids, f"two blocks share the hash {name.hex()}"
        return entry

    def learn_tokens(self, entry: Entry, token_ids: tuple[int, ...]) -> None:
        """Note the tokens of a block where they are not known; those of one on SSD are news to the log."""
        if entry.token_ids is None:
            entry.token_ids = token_ids
            if entry.ssd and self._log.is_on:
                self._log.note(entry.came_to(KvTier.SSD))

    def learn_header(self, entry: Entry, header: BlockHeader) -> None:
        """Note the tokens that a block's file tells, as long as they are of a form that is written here."""
        try:
            keys = join_keys(header.token_ids, header.extra)
        except ValueError:
            return  # not of this version: the block is found by its name alone
        self.learn_tokens(entry, keys)

    def add_stored(self, record: StoredBlock) -> Entry:
        """Note that a block is committed on SSD."""
        entry = self._entries.get(record.hash)
        if entry is None:
            entry = Entry(record.hash, record.parent, record.start_token_index, record.token_count)
            entry.hit_count = record.hit_count
            entry.is_pinned = record.pinned
            self._insert(entry)
        sizes = (record.kv_bytes, record.window_bytes, record.checkpoint_bytes)
        if sizes not in self._sizes:
            found = zip((RegionKind.KV, RegionKind.WINDOW, RegionKind.CHECKPOINT), sizes, strict=True)
            if len(self._sizes) >= _SIZES_LIMIT:
                self._sizes.clear()
            self._sizes[sizes] = {kind: size for kind, size in found if size}
        # One for all blocks of the same sizes, and so not to be changed: a third of what each would take.
        is_new, entry.ssd = not entry.ssd, self._sizes[sizes]
        entry.ssd_bytes = record.file_bytes
        if is_new and self._log.is_on:
            self._log.note(entry.came_to(KvTier.SSD))
        return entry

    def forget_stored(self, block: BlockHash) -> Entry | None:
        """Note that a block is gone from SSD; return its entry when the index knew it."""
        entry = self._entries.get(block)
        if entry is not None:
            if entry.ssd and self._log.is_on:
                self._log.note(Left(KvTier.SSD, block))
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
        shorter = [n for n in self._children.lengths(entry.parent) if n < entry.token_count]
        return [
            other
            for other in self._named(entry.parent, tokens, shorter)
            if not other.is_pinned
            and all(entry.has(kind, with_ssd=True) for kind in (*other.ram, *other.ssd))
        ]

    def discard_if_empty(self, entry: Entry) -> None:
        """Drop an entry that is in neither tier."""
        if entry.ram or entry.ssd or entry.is_spilling or self._entries.get(entry.hash) is not entry:
            return
        del self._entries[entry.hash]
        self._children.remove(entry)

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
        descent = self._descend(_roots(root, shared_root), tokens)
        counts = descent.kv_counts(with_ssd=with_ssd)
        known = 0
        for found in self._candidates(descent, tokens):
            known = known or found.token_count
            if self._is_usable(found, descent, counts, with_ssd=with_ssd):
                entries = tuple(found.backwards(descent))[::-1]
                return Match(entries, found.token_count, known)
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
        level = self._descend(_roots(root, shared_root), tokens).levels[-1]
        if level.covered == len(tokens):
            return []
        below = (
            entry
            for parent in level.parents
            for entry in itertools.islice(self._children.latest(parent), _CANDIDATE_LIMIT)
        )
        unknown = (entry for entry in below if entry.token_ids is None and entry.ssd)
        return list(itertools.islice(unknown, _UNREAD_LIMIT))

    def known_chain(self, *, root: BlockHash, token_ids: Sequence[int]) -> tuple[Entry, ...]:
        """Return every known block that is wholly part of this prompt, in order."""
        tokens = tuple(token_ids)
        levels = self._descend((root,), tokens).levels
        whole = [entry for level in levels for entry in self._whole(level, tokens)]
        return tuple(sorted(dict.fromkeys(whole), key=lambda entry: entry.end_token_index))

    def _candidates(self, descent: _Descent, tokens: tuple[int, ...]) -> Iterator[_Candidate]:
        """Yield the chains a prompt begins with, longest first."""
        for level in reversed(descent.levels):
            for entry, count in self._inside(level, tokens):
                yield _Candidate(level.covered + count, level.chain_count, entry)
            # A level whose own block is unknown repeats the chain of the one before it.
            before = descent.chain[level.chain_count - 1] if level.chain_count else None
            if before is not None and before.end_token_index == level.covered:
                yield _Candidate(level.covered, level.chain_count, None)

    def _insert(self, entry: Entry) -> None:
        above = self._entries.get(entry.parent)
        owner_above = None if above is None else above.owner
        entry.owner = owner_above if entry.start_token_index else entry.parent
        self._entries[entry.hash] = entry
        self._children.add(entry)

    def _descend(self, roots: tuple[BlockHash, ...], tokens: tuple[int, ...]) -> _Descent:
        """Walk down the full blocks of a prompt as far as they are known.

        Without kv regions the blocks between two checkpoints hold nothing and are not known, so
        the walk then goes on to the prompt's end.
        """
        size = self.rules.block_token_count
        descent = _Descent([], [])
        parents, in_ram = roots, True
        for start in range(0, len(tokens) + 1, size):
            wanted = tokens[start : start + size]
            is_full = len(wanted) == size
            names = tuple(self.name_of(parent=p, token_ids=wanted) for p in parents) if is_full else ()
            descent.levels.append(_Level(parents, start, len(descent.chain), names))
            entry = self._best(names, wanted, in_ram=in_ram)
            if entry is not None:
                descent.chain.append(entry)
                in_ram = in_ram and RegionKind.KV in entry.ram
            elif self.rules.facts.has_kv:
                break
            if not is_full:
                break
            parents = names
        return descent

    def _best(self, names: tuple[BlockHash, ...], wanted: tuple[int, ...], *, in_ram: bool) -> Entry | None:
        """Return the block with these tokens that holds most; of equal ones the first that goes on where
        the chain is, `in_ram` or, behind the first gap there, on SSD."""
        found = [entry for name in names if (entry := self._entries.get(name)) is not None]
        same = [entry for entry in found if entry.token_ids in (None, wanted)]
        return max(same, key=lambda e: (len({*e.ram, *e.ssd}), len(e.ram if in_ram else e.ssd)), default=None)

    def _named(self, parent: BlockHash, tokens: tuple[int, ...], lengths: Sequence[int]) -> Iterator[Entry]:
        """Yield the known blocks below `parent` that are the first so many of these tokens."""
        secret = self.rules.name_secret
        names = prefix_key_hashes(parent=parent, keys=tokens, lengths=lengths, secret=secret)
        for name, length in zip(names, lengths, strict=True):
            entry = self._entries.get(name)
            if entry is not None and entry.token_ids in (None, tokens[:length]):
                yield entry

    def _whole(self, level: _Level, tokens: tuple[int, ...]) -> list[Entry]:
        """Return the children at this place that are wholly part of the prompt: one look for each length."""
        size = self.rules.block_token_count
        rest = tokens[level.covered : level.covered + size]
        found = [e for name in level.names if (e := self._entries.get(name)) is not None]
        found = [entry for entry in found if entry.token_ids in (None, rest)]
        for parent in level.parents:
            shorter = [n for n in self._children.lengths(parent) if n <= len(rest) and n < size]
            found += self._named(parent, rest, shorter)
        return found

    def _inside(self, level: _Level, tokens: tuple[int, ...]) -> list[tuple[Entry, int]]:
        """Return children that begin like the rest, with how much of each is wanted; longest first."""
        found = [(entry, entry.token_count) for entry in self._whole(level, tokens)]
        if self.rules.facts.cuttable_inside:
            rest = tokens[level.covered : level.covered + self.rules.block_token_count]
            for parent in level.parents:
                for entry in self._children.of(parent, limit=_CANDIDATE_LIMIT):
                    count = common_prefix(entry.token_ids or (), rest)
                    if 0 < count < entry.token_count:
                        found.append((entry, count))
        return sorted(found, key=lambda pair: -pair[1])

    def _is_usable(
        self, found: _Candidate, descent: _Descent, counts: tuple[int, int], *, with_ssd: bool
    ) -> bool:
        """Say whether a restore can be made. What is asked of every block is in `counts` (`kv_counts`);
        the rest is asked of those in the window, and of the last."""
        facts, token_count = self.rules.facts, found.token_count
        last = next(found.backwards(descent))
        if facts.needs_checkpoint:
            is_at_end = last.end_token_index == token_count
            if not (is_at_end and last.has(RegionKind.CHECKPOINT, with_ssd=with_ssd)):
                return False
        if facts.has_kv:
            ram_count, kv_count = counts
            if found.chain_count > kv_count:
                return False
            if found.last is not None:
                goes_on_in_ram = found.chain_count <= ram_count and RegionKind.KV in found.last.ram
                if not (goes_on_in_ram or (with_ssd and RegionKind.KV in found.last.ssd)):
                    return False
        return self._covers_window(found, descent, with_ssd=with_ssd)

    def _covers_window(self, found: _Candidate, descent: _Descent, *, with_ssd: bool) -> bool:
        """Say whether the blocks reach back as far as the window does, and have what it holds; without kv
        a chain may have gaps."""
        window = self.rules.facts.window_token_count
        window_start = max(0, found.token_count - window)
        covered_from = found.token_count
        for entry in found.backwards(descent):
            if covered_from <= window_start or entry.end_token_index < covered_from:
                break
            if window and not entry.has(RegionKind.WINDOW, with_ssd=with_ssd):
                return False
            covered_from = entry.start_token_index
        return covered_from <= window_start


def _roots(own: BlockHash, shared: BlockHash | None) -> tuple[BlockHash, ...]:
    return (own,) if shared in (None, own) else (own, shared)


def common_prefix(known: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return how many tokens two blocks have in common from their beginning on."""
    limit = min(len(known), len(wanted))
    if known[:limit] == wanted[:limit]:
        return limit
    return next(i for i in range(limit) if known[i] != wanted[i])
