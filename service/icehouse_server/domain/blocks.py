"""Blocks: fixed runs of tokens, their chained identity, and their bytes on the host.

A block's name is its hash, h_i = SHA-256(h_{i-1} || token ids || extra). h_0 is the root of one fingerprint,
tenant and LoRA adapter. The same tokens have the same hash in every process and version (golden vectors in
the tests). A hash does not show its tokens, but it can confirm a guess of them. So if blocks are encrypted on
SSD, the hash is an HMAC under a secret that is derived from the key.

A token key is the integer by which the prefix cache knows a token. The key of a text token is its id. The key
of a token in an image's span has the image's digest, the token's place in the span, and its id. So code that
compares, cuts and hashes runs of tokens works for prompts with images too: only the same image matches. In
hash, file and row a run is split into token ids and `extra`. `extra` lists the images that the run overlaps:
which one, where in the run, from where in its span, and how many tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from icehouse_server.domain.ids import AdapterDigest, BlockHash, Fingerprint, ImageDigest, Tenant

LAYOUT_ABI = 1
"""Version of the block file's layout. Files of another version are deleted, never read."""

_ROOT_TAG = b"icehouse.block.root.v1\x00"
_ADAPTED_ROOT_TAG = b"icehouse.block.root.adapted.v1\x00"
_BLOCK_TAG = b"icehouse.block.v1\x00"


def root_hash(
    *, fingerprint: Fingerprint, tenant: Tenant, adapter: AdapterDigest | None = None, secret: bytes = b""
) -> BlockHash:
    """Return h_0, the parent of every first block of this fingerprint, tenant and adapter."""
    salt = hashlib.sha256(tenant.encode("utf-8")).digest()
    if adapter is None:
        return _digest(_ROOT_TAG + fingerprint + salt, secret)
    return _digest(_ADAPTED_ROOT_TAG + fingerprint + salt + adapter, secret)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32, the form that is hashed and stored."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Invert `pack_tokens`."""
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


def block_hash(
    *, parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"", secret: bytes = b""
) -> BlockHash:
    """Return the hash of the block with these tokens below `parent`.

    `extra` says which images the block overlaps, and where (`join_keys`). The token count is hashed too, so
    that a tail and a full block never share a name by chance. With a `secret`, only those who know it can
    check a guess of a block's tokens against its name.
    """
    count = len(token_ids).to_bytes(8, "little")
    return _digest(_BLOCK_TAG + parent + count + pack_tokens(token_ids) + extra, secret)


TokenKeys = tuple[int, ...]
"""One key for each token of a run."""

_ID_BITS: Final = 32
_PLACE_BITS: Final = 32
_DIGEST_BYTES: Final = 32
_IMAGE_FLAG: Final = 1 << (_ID_BITS + _PLACE_BITS + 8 * _DIGEST_BYTES)
"""Set in an image's keys, so that a digest that begins with zeros is not taken for a token id."""
_ID_MASK: Final = (1 << _ID_BITS) - 1
_PART: Final = struct.Struct(f"<{_DIGEST_BYTES}sIII")


class ImageRun(NamedTuple):
    """What a run contains of one image, as `extra` stores it."""

    digest: ImageDigest
    start: int
    """Where its tokens begin in the run."""
    place: int
    """Where the first of them is in the image's span."""
    token_count: int


def image_keys(digest: ImageDigest, token_ids: Sequence[int], *, place: int = 0) -> TokenKeys:
    """Return the keys of tokens in an image's span, the first of them at `place`."""
    assert len(digest) == _DIGEST_BYTES, len(digest)
    image = _IMAGE_FLAG | int.from_bytes(digest, "big") << (_PLACE_BITS + _ID_BITS)
    return tuple(image | (place + i) << _ID_BITS | token_id for i, token_id in enumerate(token_ids))


def token_id_of(key: int) -> int:
    """Return the id of the token."""
    return key & _ID_MASK


def has_image(keys: Sequence[int]) -> bool:
    """Whether any of these tokens belongs to an image."""
    return max(keys, default=0) > _ID_MASK


def split_keys(keys: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """Return the token ids of a run and its `extra`, which is empty if the run is only text."""
    if not has_image(keys):
        return tuple(keys), b""
    parts = b"".join(_PART.pack(*part) for part in image_runs(keys))
    return tuple(key & _ID_MASK for key in keys), parts


def join_keys(token_ids: Sequence[int], extra: bytes) -> TokenKeys:
    """Invert `split_keys`. Raises ValueError for anything that it never writes."""
    keys = list(token_ids)
    for digest, start, place, count in runs_of(extra):
        if not 0 < count <= len(keys) - start:
            raise ValueError(f"{count} image tokens at {start} are not inside a block of {len(keys)}")
        keys[start : start + count] = image_keys(digest, token_ids[start : start + count], place=place)
    return tuple(keys)


def key_hash(*, parent: BlockHash, keys: Sequence[int], secret: bytes = b"") -> BlockHash:
    """Return the hash of the block with these tokens below `parent`."""
    token_ids, extra = split_keys(keys)
    return block_hash(parent=parent, token_ids=token_ids, extra=extra, secret=secret)


def prefix_key_hashes(
    *, parent: BlockHash, keys: Sequence[int], lengths: Sequence[int], secret: bytes = b""
) -> list[BlockHash]:
    """Return `key_hash` of each of these prefixes, given by their `lengths`; text is packed only once."""
    if has_image(keys):
        return [key_hash(parent=parent, keys=keys[:length], secret=secret) for length in lengths]
    packed = pack_tokens(keys)
    counts = [(length, length.to_bytes(8, "little")) for length in lengths]
    return [
        _digest(b"".join((_BLOCK_TAG, parent, count, packed[: 4 * length])), secret)
        for length, count in counts
    ]


def image_runs(keys: Sequence[int]) -> Iterator[ImageRun]:
    """Yield the runs of tokens that are consecutive in one image's span."""
    start = 0
    while start < len(keys):
        stop = start + 1
        if keys[start] > _ID_MASK:
            step = 1 << _ID_BITS
            first = keys[start] & ~_ID_MASK
            while stop < len(keys) and keys[stop] & ~_ID_MASK == first + (stop - start) * step:
                stop += 1
            digest = (first & ~_IMAGE_FLAG) >> (_PLACE_BITS + _ID_BITS)
            place = first >> _ID_BITS & ((1 << _PLACE_BITS) - 1)
            name = ImageDigest(digest.to_bytes(_DIGEST_BYTES, "big"))
            yield ImageRun(name, start, place, stop - start)
        start = stop


def runs_of(extra: bytes) -> tuple[ImageRun, ...]:
    """Return the runs that `split_keys` wrote. Raises ValueError for anything that it never writes."""
    if len(extra) % _PART.size:
        raise ValueError(f"{len(extra)} bytes are no parts of images, which have {_PART.size} each")
    return tuple(ImageRun(*part) for part in _PART.iter_unpack(extra))


def _digest(data: bytes, secret: bytes) -> BlockHash:
    return BlockHash(hmac.digest(secret, data, "sha256") if secret else hashlib.sha256(data).digest())


class RegionKind(enum.StrEnum):
    """The three parts of a block, in file order."""

    KV = "kv"
    """KV of the layers with unlimited context, for exactly these tokens."""
    WINDOW = "window"
    """KV of the sliding-window layers: the last min(block, window) tokens, in temporal order."""
    CHECKPOINT = "checkpoint"
    """The whole state, at the block's end, of layers whose state cannot be cut."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostTensor:
    """One array in host memory. Cannot hold an mx.array: this type crosses to the storage thread.

    `dtype` is the safetensors name (F32, BF16, F16, U32, ...); `data` is C-contiguous,
    one-dimensional, of format "B", and keeps its owner alive.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        assert type(self.data) is memoryview and self.data.format == "B" and self.data.ndim == 1, self.name


@dataclasses.dataclass(frozen=True, slots=True)
class HostRegion:
    """The tensors of one kind, in the order of the file."""

    kind: RegionKind
    tensors: tuple[HostTensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block is, without its bytes. The same in the file, in the row and in memory."""

    hash: BlockHash
    parent: BlockHash
    fingerprint: Fingerprint
    start_token_index: int
    """Position of the block's first token in the sequence; a multiple of `block_token_limit`."""
    token_ids: tuple[int, ...]
    block_token_limit: int
    """Tokens of a full block (256 by default). Fewer tokens than this make a tail."""
    extra: bytes = b""
    """Which images the block overlaps, and where (`join_keys`); part of the hash."""

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def end_token_index(self) -> int:
        return self.start_token_index + len(self.token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class HostBlock:
    """A block with its bytes, ready to be written, or just read and verified."""

    header: BlockHeader
    regions: tuple[HostRegion, ...]

    @property
    def size_bytes(self) -> int:
        return sum(r.size_bytes for r in self.regions)


class Region(Protocol):
    """The arrays of one region of one block on the device."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""


class BlockDamage(enum.StrEnum):
    """Why a file is not the block that it should be. Also the cause of a failed load."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    HEADER = "header"
    CHECKSUM = "checksum"
    MISMATCH = "mismatch"
    AUTH_TAG = "seal"
    """Its authentication tag does not match: somebody changed it, or it was never encrypted."""
    OTHER_ABI = "other_abi"
    IO = "io"
    LAYOUT = "layout"
    """Its tensors are not those of the blocks before it."""
    MEMORY = "memory"
    """There was no memory or file descriptor to read it; the file is not at fault."""
