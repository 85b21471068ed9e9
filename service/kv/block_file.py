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

_FIRST_READ_BYTES = 32 << 10
"""Covers the head of all but the deepest models in one read."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block ready to be written: its parts in file order and what the file will say."""

    parts: tuple[bytes | memoryview, ...]
    file: BlockFile


def encode_block(block: HostBlock) -> EncodedBlock:
    """Return the parts of a block's file; tensor bytes are hashed but not copied.

    A block whose hash is not that of its tokens, or whose tensors lie about their sizes,
    is a broken invariant of the caller.
    """
    header = block.header
    expected = block_hash(parent=header.parent, token_ids=header.token_ids, extra=header.extra)
    assert header.hash == expected, f"Block {header.hash.hex()} does not have the hash of its tokens"
    kinds = [region.kind for region in block.regions]
    assert kinds == [kind for kind in REGION_ORDER if kind in kinds], f"Regions out of order: {kinds}"

    offset = 0
    regions: list[FileRegion] = []
    entries: dict[str, dict[str, object]] = {}
    parts: list[memoryview] = []
    for region in block.regions:
        start = offset
        digest = xxhash.xxh3_64()
        tensors = []
        for tensor in region.tensors:
            size_bytes = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert tensor.data.nbytes == size_bytes, (
                f"{tensor.name}: {tensor.data.nbytes} bytes, not {size_bytes}"
            )
            digest.update(tensor.data)
            key = f"{region.kind}.{tensor.name}"
            assert key not in entries, f"Tensor {key} twice in one block"
            entries[key] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size_bytes],
            }
            tensors.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, offset, size_bytes))
            parts.append(tensor.data)
            offset += size_bytes
        regions.append(FileRegion(region.kind, start, offset - start, digest.intdigest(), tuple(tensors)))

    head, checksum = encode_head(header, regions, entries)
    placed = tuple(_shift(region, len(head)) for region in regions)
    file = BlockFile(header=header, regions=placed, file_bytes=len(head) + offset, header_checksum=checksum)
    return EncodedBlock(parts=(head, *parts), file=file)


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


def _shift(region: FileRegion, by_bytes: int) -> FileRegion:
    tensors = tuple(dataclasses.replace(t, offset=t.offset + by_bytes) for t in region.tensors)
    return dataclasses.replace(region, offset=region.offset + by_bytes, tensors=tensors)


def _read_exactly(files: Files, descriptor: int, buffer: memoryview, *, offset: int) -> None:
    got = files.read_into(descriptor, [buffer], offset=offset)
    if got != buffer.nbytes:
        raise BlockFileError(Damage.TRUNCATED, f"{got} bytes at {offset}, where {buffer.nbytes} were due")
