"""Commands to the prefix cache that are not part of a running request, and their answers.

Each command is answered once, with its answer or an `IcehouseError`: `CACHE_UNSUPPORTED` if the cache or tier
that it needs is missing, `BLOCK_NOT_FOUND` for a pin that finds nothing.
"""

from __future__ import annotations

import dataclasses
import enum

from icehouse_server.domain.blocks import HostBlock, HostRegion, TokenKeys
from icehouse_server.domain.events import CacheReport
from icehouse_server.domain.ids import (
    DEFAULT_SCOPE,
    DEFAULT_TENANT,
    AdapterDigest,
    BlockHash,
    CacheScope,
    SessionKey,
    Tenant,
)


class Tier(enum.Enum):
    """Where a block is kept."""

    RAM = enum.auto()
    SSD = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Explain:
    """How much of this prompt would a request reuse? Answered by `Explanation`."""

    prompt_token_ids: tuple[int, ...]
    scope: CacheScope = DEFAULT_SCOPE
    shared_scope: CacheScope | None = None
    """A second scope whose blocks the request may start from."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMatch:
    """One known block of a prompt."""

    hash: BlockHash
    start_token_index: int
    token_count: int
    size_bytes: int
    tier: Tier
    """RAM if both tiers have it."""
    has_checkpoint: bool
    pinned: bool
    session: SessionKey | None = None
    """The session that computed it, if no other session has used it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What would be reused, and all blocks that match. Predictions are None until something was measured."""

    cache: CacheReport
    """`restore_s` is a prediction."""
    blocks: tuple[BlockMatch, ...]
    predicted_ttft_s: float | None = None
    predicted_cold_ttft_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """Protect the known blocks of this prompt from eviction by policy. Answered by `PinReport`."""

    prompt_token_ids: tuple[int, ...]
    scope: CacheScope = DEFAULT_SCOPE
    ttl_s: float | None = None
    """How long from now; None until they are unpinned. A pin never shortens an earlier one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unpin:
    """Unpin the known blocks of this prompt. Answered by `PinReport`."""

    prompt_token_ids: tuple[int, ...]
    scope: CacheScope = DEFAULT_SCOPE


@dataclasses.dataclass(frozen=True, slots=True)
class PinReport:
    """The blocks that were pinned or unpinned."""

    block_count: int
    token_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class EvictReport:
    """What was removed from each tier. A block in both tiers counts in both."""

    ram_block_count: int = 0
    ram_bytes: int = 0
    ssd_block_count: int = 0
    ssd_bytes: int = 0

    def joined(self, other: EvictReport) -> EvictReport:
        return EvictReport(
            ram_block_count=self.ram_block_count + other.ram_block_count,
            ram_bytes=self.ram_bytes + other.ram_bytes,
            ssd_block_count=self.ssd_block_count + other.ssd_block_count,
            ssd_bytes=self.ssd_bytes + other.ssd_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EndSession:
    """Let the blocks that only this session has used be evicted first. Answered by `SessionEndReport`."""

    session_id: str
    tenant: Tenant = DEFAULT_TENANT


@dataclasses.dataclass(frozen=True, slots=True)
class SessionEndReport:
    """The blocks that will now be evicted first; none if the session is unknown."""

    block_count: int = 0
    ram_bytes: int = 0
    ssd_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ListKnown:
    """Which blocks of this prompt (None: of the model) are known? Answered by `KnownBlocks`."""

    prompt_token_ids: tuple[int, ...] | None
    scope: CacheScope = DEFAULT_SCOPE


@dataclasses.dataclass(frozen=True, slots=True)
class KnownBlocks:
    """Names of blocks in either tier, the newest first. So a block comes after its children, unless it was
    evicted and computed again."""

    block_hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ListRecent:
    """Which blocks were used last? Those in RAM come first, then those on SSD. Answered by `RecentBlocks`."""

    block_limit: int
    with_tokens: bool = False
    """Whether to include their tokens if this process knows them."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecentBlock:
    """One known block, without its tokens unless they were asked for."""

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    token_count: int
    hit_count: int
    """How many prompts reused it."""
    is_in_ram: bool
    is_on_ssd: bool
    token_keys: TokenKeys | None = dataclasses.field(default=None, repr=False)
    """None if not asked for, or for a block on SSD whose tokens this process never read."""

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + self.token_count


@dataclasses.dataclass(frozen=True, slots=True)
class RecentBlocks:
    """The most recently used blocks of all tenants."""

    blocks: tuple[RecentBlock, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EvictBlocks:
    """Remove these blocks from both tiers, pinned ones too; missing ones are skipped.

    Answered by `EvictReport`.
    """

    block_hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verify:
    """Read blocks on SSD and compare checksums. Answered by `VerifyReport`."""

    block_hashes: tuple[BlockHash, ...] | None = None
    """None: all blocks. Missing ones are skipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class ListStored:
    """Which blocks are on SSD? Of all models, least recently verified first. Answered by `StoredBlocks`."""

    block_limit: int = 0
    """Most blocks to name; 0: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Names of blocks on SSD."""

    block_hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of the check; damaged blocks are in quarantine."""

    verified_block_count: int
    verified_bytes: int
    damaged_hashes: tuple[BlockHash, ...]
    duration_s: float

    def joined(self, other: VerifyReport) -> VerifyReport:
        return VerifyReport(
            verified_block_count=self.verified_block_count + other.verified_block_count,
            verified_bytes=self.verified_bytes + other.verified_bytes,
            damaged_hashes=self.damaged_hashes + other.damaged_hashes,
            duration_s=self.duration_s + other.duration_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BeginListing:
    """Write every known block to the block log, and every change from now on. Answered by `ExportListing`."""

    tenants: tuple[Tenant, ...]
    """Tenants whose blocks must be recognized as theirs even before their first request."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContinueListing:
    """Write the next part of the blocks. Answered by `ExportListing`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportListing:
    """How many blocks are still to be written."""

    left_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReadTokens:
    """Which tokens are in these blocks on SSD? Answered by `BlockTokens`."""

    block_hashes: tuple[BlockHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens of one block."""

    hash: BlockHash
    token_ids: tuple[int, ...]
    extra: bytes = b""
    """Which images it overlaps, as in its header."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockTokens:
    """The blocks that could be read; the others are damaged or missing."""

    blocks: tuple[KnownTokens, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ListExport:
    """Which blocks of this prompt can be exported, from SSD or by writing them there first? None: all blocks
    of the scope's tenant, with every adapter. Answered by `ExportBlocks`."""

    prompt_token_ids: TokenKeys | None
    scope: CacheScope = DEFAULT_SCOPE


@dataclasses.dataclass(frozen=True, slots=True)
class ExportBlock:
    """One block that `ReadBlock` may ask for."""

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    adapter: AdapterDigest | None
    """None for the bare model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportBlocks:
    """Parents come before their children. Blocks whose chain to the root has a gap are left out."""

    blocks: tuple[ExportBlock, ...]
    block_token_limit: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read a whole block from SSD, verified and decrypted. A block that is only in RAM is written first.

    Answered by `BlockContent`, or `BLOCK_NOT_FOUND`.
    """

    block_hash: BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class BlockContent:
    """A block with its bytes, under the name that it has on this server."""

    block: HostBlock


@dataclasses.dataclass(frozen=True, slots=True)
class BeginImport:
    """Which blocks can be adopted? Answered by `ImportTerms`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImportTerms:
    """Limits of a block that can be adopted."""

    block_token_limit: int
    block_limit_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptBlock:
    """Write a block to SSD that the same model computed elsewhere. Answered by `BlockAdoption`."""

    tenant: Tenant
    adapter: AdapterDigest | None
    parent: BlockHash | None
    """The name, on this server, of the block before it; None for a prompt's first block."""
    start_token_index: int
    keys: TokenKeys
    regions: tuple[HostRegion, ...] = dataclasses.field(repr=False)


class AdoptionRefusal(enum.Enum):
    """Why a block was not adopted."""

    DAMAGED = enum.auto()
    """Its content does not match its name."""
    LAYOUT = enum.auto()
    """Its tensors are not those of this model's blocks, or contain a state that only this machine's owner may
    import."""
    SCOPE = enum.auto()
    """It belongs to another tenant, or to an adapter that is not served."""
    PARENT_MISSING = enum.auto()
    """The block before it is not on this server."""
    QUOTA = enum.auto()
    """The tenant's quota on SSD has no space for it."""
    SSD_FULL = enum.auto()
    """The SSD tier has no space for it, or cannot write now."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockAdoption:
    """Whether a block was adopted."""

    hash: BlockHash
    """Its name on this server."""
    is_new: bool = False
    """Whether this server did not have it before."""
    refusal: AdoptionRefusal | None = None


CacheCommand = (
    Explain
    | Pin
    | Unpin
    | EndSession
    | ListKnown
    | ListRecent
    | EvictBlocks
    | Verify
    | ListStored
    | BeginListing
    | ContinueListing
    | ReadTokens
    | ListExport
    | ReadBlock
    | BeginImport
    | AdoptBlock
)
CacheAnswer = (
    Explanation
    | PinReport
    | EvictReport
    | SessionEndReport
    | KnownBlocks
    | RecentBlocks
    | VerifyReport
    | StoredBlocks
    | ExportListing
    | BlockTokens
    | ExportBlocks
    | BlockContent
    | ImportTerms
    | BlockAdoption
)
