"""Blocks for the index without arrays or files: regions that are sizes, records that are facts."""

from __future__ import annotations

import dataclasses
from typing import Any

from icehouse_server.domain.blocks import RegionKind, block_hash, root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, Fingerprint, Tenant
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex, IndexRules
from icehouse_server.storage.record import BlockRecord

FINGERPRINT = Fingerprint(b"i" * 32)
SIZE = 4
"""Tokens of a full block."""
ROOT = root_hash(fingerprint=FINGERPRINT, tenant=DEFAULT_TENANT)

KV_ONLY = IndexRules(
    block_token_count=SIZE, has_kv=True, cuttable_inside=True, needs_checkpoint=False, window_token_count=0
)
WINDOWS = dataclasses.replace(KV_ONLY, window_token_count=6)
SHORT_WINDOWS = dataclasses.replace(KV_ONLY, window_token_count=3, cuttable_inside=False)
HYBRID = dataclasses.replace(KV_ONLY, needs_checkpoint=True, cuttable_inside=False)
STATE_ONLY = dataclasses.replace(HYBRID, has_kv=False)


@dataclasses.dataclass(frozen=True)
class SizedRegion:
    """A region that is nothing but its size."""

    size_bytes: int = 10


def root_of(tenant: str) -> BlockHash:
    return root_hash(fingerprint=FINGERPRINT, tenant=Tenant(tenant))


def record_of(entry: Entry, *kinds: RegionKind, pinned: bool = False) -> BlockRecord:
    """Return the row of a block with these regions on SSD."""
    values: dict[str, Any] = dict.fromkeys(BlockRecord._fields, 0)
    values |= {f"{kind}_bytes": 100 for kind in kinds}
    values |= {
        "hash": entry.hash,
        "parent": entry.parent,
        "fingerprint": FINGERPRINT,
        "start_token_index": entry.start_token_index,
        "token_count": entry.token_count,
        "block_token_limit": SIZE,
        "file_bytes": 1000,
        "pinned": pinned,
    }
    return BlockRecord(**values)


class Shelf:
    """An index that is filled block by block."""

    def __init__(self, rules: IndexRules = KV_ONLY) -> None:
        self.index = BlockIndex(rules)
        self.rules = rules

    def chain(
        self, tokens: list[int], *, ram: bool = False, ssd: bool = False, root: BlockHash = ROOT
    ) -> list[Entry]:
        """Add the blocks of these tokens, the tail too, with every region they can have."""
        made: list[Entry] = []
        parent = root
        for start in range(0, len(tokens), SIZE):
            entry = self.block(parent, start, tokens[start : start + SIZE], ram=ram, ssd=ssd)
            made.append(entry)
            parent = entry.hash
        return made

    def block(self, parent: BlockHash, start: int, tokens: list[int], *, ram: bool, ssd: bool) -> Entry:
        """Add one block, or put it into one more tier."""
        entry = self.index.add(parent=parent, start_token_index=start, token_ids=tuple(tokens))
        kinds = self.kinds()
        if ram:
            entry.ram |= {kind: SizedRegion() for kind in kinds}
        if ssd:
            self.index.add_stored(record_of(entry, *kinds))
        return entry

    def kinds(self) -> list[RegionKind]:
        """Return every region a block of this model can have."""
        kinds = [RegionKind.KV] if self.rules.has_kv else []
        kinds += [RegionKind.WINDOW] if self.rules.window_token_count else []
        return kinds + ([RegionKind.CHECKPOINT] if self.rules.needs_checkpoint else [])

    def matched(
        self,
        tokens: list[int],
        *,
        with_ssd: bool = True,
        root: BlockHash = ROOT,
        shared_root: BlockHash | None = None,
    ) -> int:
        """Return how much of a prompt matches when all of it but the last token may."""
        match = self.index.match(
            root=root,
            token_ids=tokens,
            token_limit=len(tokens) - 1,
            with_ssd=with_ssd,
            shared_root=shared_root,
        )
        assert match.known_token_count >= match.token_count
        return match.token_count


def hash_of(parent: BlockHash, tokens: list[int]) -> BlockHash:
    return block_hash(parent=parent, token_ids=tuple(tokens))
