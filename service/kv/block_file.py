"""The block file: one block as one safetensors file that describes itself.

Layout: 8 bytes of header length (little endian), a JSON header padded with spaces to a
multiple of 8, then the regions kv, window, checkpoint, each contiguous, each tensor as its
C-contiguous bytes. The header is written here and not by the safetensors library because
the library orders tensors by dtype, and a restore needs regions as ranges; every safetensors
reader can read the result.

Trust: the header's first value is the xxh3 of the whole header with that value set to zeros,
so no bit of the header can change unseen; each region carries the xxh3 of its bytes; the
block's hash is computed again from its parent and token ids. All of it is checked before a
byte is used. `__metadata__` begins so in every layout ABI, so that other ABIs can be told
from damage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import xxhash

from service.domain.blocks import HostBlock, block_hash
from service.kv.block_head import (
    DTYPE_BYTES,
    REGION_ORDER,
    BlockFile,
    BlockFileError,
    Damage,
    FileRegion,
    FileTensor,
    encode_head,
    head_length,
    parse_head,
)
from service.kv.files import Files

GROUP_BYTES = 256 << 10
"""Bytes that are hashed and transferred at a time; several fit the second-level cache."""
_FIRST_READ_BYTES = 32 << 10
"""Covers the head of all but the deepest models in one read."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block whose facts have been checked and whose file's size is known."""

    block: HostBlock
    head_bytes: int
    file_bytes: int


def prepare_block(block: HostBlock) -> PreparedBlock:
    """Check a block before anything is reserved or written for it.

    A block whose hash is not that of its tokens, or whose tensors lie about their sizes,
    is a broken invariant of the caller.
    """
    header = block.header
    expected = block_hash(parent=header.parent, token_ids=header.token_ids, extra=header.extra)
    assert header.hash == expected, f"Block {header.hash.hex()} does not have the hash of its tokens"
    kinds = [region.kind for region in block.regions]
    assert kinds == [kind for kind in REGION_ORDER if kind in kinds], f"Regions out of order: {kinds}"
    for region in block.regions:
        names = [tensor.name for tensor in region.tensors]
        assert len(set(names)) == len(names), f"Two tensors of one name in region {region.kind}"
        for tensor in region.tensors:
            size_bytes = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert tensor.data.nbytes == size_bytes, f"{tensor.name} does not have {size_bytes} bytes"
    # Checksums have a fixed width, so the head's length is known before they are.
    head, _ = encode_head(header, _describe(block, checksums=[0] * len(block.regions), begin=0))
    return PreparedBlock(block, head_bytes=len(head), file_bytes=len(head) + block.size_bytes)


def write_block(files: Files, descriptor: int, prepared: PreparedBlock) -> BlockFile:
    """Write a block into a new, empty file and return what the file says.

    Tensor bytes are hashed group by group right before they are written, while they are in
    the CPU's cache, and never copied here; the head, which holds the checksums, comes last.
    """
    block = prepared.block
    offset = prepared.head_bytes
    checksums = []
    for region in block.regions:
        digest = xxhash.xxh3_64()
        for group, size_bytes in groups(part for tensor in region.tensors for part in slices(tensor.data)):
            for part in group:
                digest.update(part)
            files.write(descriptor, group, offset=offset)
            offset += size_bytes
        checksums.append(digest.intdigest())
    regions = _describe(block, checksums=checksums, begin=prepared.head_bytes)
    head, header_checksum = encode_head(block.header, regions, begin=prepared.head_bytes)
    assert (len(head), offset) == (prepared.head_bytes, prepared.file_bytes), (
        "The file is not what was prepared"
    )
    files.write(descriptor, [head], offset=0)
    return BlockFile(block.header, regions, offset, header_checksum)


def read_head(files: Files, descriptor: int) -> BlockFile:
    """Return what an open file says about itself, fully checked except for its tensor bytes.

    Raises `BlockFileError` when it is damaged or of another ABI, `OSError` from the system.
    """
    file_bytes = files.size(descriptor)
    buffer = bytearray(min(file_bytes, _FIRST_READ_BYTES))
    _read_exactly(files, descriptor, memoryview(buffer), offset=0)
    head_bytes = head_length(buffer, file_bytes=file_bytes)
    if head_bytes > len(buffer):
        rest = bytearray(head_bytes - len(buffer))
        _read_exactly(files, descriptor, memoryview(rest), offset=len(buffer))
        buffer += rest
    return parse_head(bytes(buffer[:head_bytes]), file_bytes=file_bytes)


def slices(data: memoryview) -> Iterator[memoryview]:
    """Yield a buffer in pieces that fit a group."""
    if data.nbytes <= GROUP_BYTES:
        yield data
    else:
        for begin in range(0, data.nbytes, GROUP_BYTES):
            yield data[begin : begin + GROUP_BYTES]


def groups(parts: Iterable[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield runs of parts that go through one call and one hash while they are cached, with their bytes."""
    group: list[memoryview] = []
    size_bytes = 0
    for part in parts:
        group.append(part)
        size_bytes += part.nbytes
        if size_bytes >= GROUP_BYTES:
            yield group, size_bytes
            group, size_bytes = [], 0
    if group:
        yield group, size_bytes


def _describe(block: HostBlock, *, checksums: Sequence[int], begin: int) -> tuple[FileRegion, ...]:
    """Return the regions of a file whose head has `begin` bytes."""
    regions = []
    offset = begin
    for region, checksum in zip(block.regions, checksums, strict=True):
        tensors = []
        start = offset
        for tensor in region.tensors:
            tensors.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, offset, tensor.data.nbytes))
            offset += tensor.data.nbytes
        regions.append(FileRegion(region.kind, start, offset - start, checksum, tuple(tensors)))
    return tuple(regions)


def _read_exactly(files: Files, descriptor: int, buffer: memoryview, *, offset: int) -> None:
    got = files.read_into(descriptor, [buffer], offset=offset)
    if got != buffer.nbytes:
        raise BlockFileError(Damage.TRUNCATED, f"{got} bytes at {offset}, where {buffer.nbytes} were due")
