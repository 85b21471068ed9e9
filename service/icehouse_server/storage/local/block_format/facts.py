"""Block facts: whose block a file is, and where its regions and tensors lie."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import BlockHeader, RegionKind
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.local.encryption.facts import FileCipher


@dataclasses.dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor's place. `offset` counts from the start of the file; `name` is without its region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class FileRegion:
    """One region's place and the xxh3 (64 bits) of its bytes."""

    kind: RegionKind
    offset: int
    size_bytes: int
    checksum: int
    tensors: tuple[FileTensor, ...]
    """Empty when the file is encrypted under a key that is not known here."""
    tag: bytes = b""
    """What proves an encrypted region to those who have the key."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOutline:
    """What everybody may know of a block: its header without its tokens."""

    hash: BlockHash
    parent: BlockHash
    fingerprint: Fingerprint
    start_token_index: int
    token_count: int
    block_token_limit: int

    @classmethod
    def of(cls, header: BlockHeader) -> BlockOutline:
        """Return the outline of a block whose header is known."""
        return cls(
            header.hash,
            header.parent,
            header.fingerprint,
            header.start_token_index,
            header.token_count,
            header.block_token_limit,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFile:
    """All facts of one block file without its tensor bytes."""

    outline: BlockOutline
    header: BlockHeader | None
    """None when the file is encrypted under a key that is not known here."""
    regions: tuple[FileRegion, ...]
    file_bytes: int
    header_checksum: int
    key_id: bytes = b""
    """The key it is encrypted under; none for a file in the clear."""
    cipher: FileCipher | None = dataclasses.field(default=None, repr=False, compare=False)
    """Decrypts its regions."""

    def region(self, kind: RegionKind) -> FileRegion | None:
        """Return the region of this kind, or None when the block has none."""
        return next((region for region in self.regions if region.kind is kind), None)

    def region_bytes(self, kind: RegionKind) -> int:
        """Return the bytes of the region of this kind; 0 when the block has none."""
        region = self.region(kind)
        return region.size_bytes if region else 0
