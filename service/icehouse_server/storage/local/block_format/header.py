"""Header of a block file: the facts of a block and of where its tensors lie, to bytes and back.

Pure functions over bytes; `block_file` says what the file is and why. Nothing that comes
from a disk is believed here: see `parse_head`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import xxhash

from icehouse_server.domain.blocks import (
    LAYOUT_ABI,
    BlockHeader,
    Damage,
    RegionKind,
    block_hash,
    pack_tokens,
    unpack_tokens,
)
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.local.block_format.damage import BlockFileError
from icehouse_server.storage.local.block_format.facts import BlockFile, BlockOutline, FileRegion, FileTensor

FORMAT = "icehouse.block"
HEADER_LIMIT_BYTES = 8 << 20
"""A longer header is a lie: 512 layers of five tensors need a tenth of it."""
_TOKEN_LIMIT = 1 << 40
"""More than any prompt has."""
_ALIGNMENT_BYTES = 8
_METADATA_KEY = b'{"__metadata__":'
_HEAD = _METADATA_KEY + b'{"header_xxh3":"'
_ZEROS = b"0" * 16
_CHECKSUM_AT = 8 + len(_HEAD)

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64"), 8),
}
"""Bytes per element of the safetensors dtypes that a cache can hold, and no others."""
_DIMENSION_LIMIT = 2**31 - 1
"""Largest that an array of MLX has; one of an empty tensor is bounded by nothing else."""

REGION_ORDER = tuple(RegionKind)
_KINDS = {str(kind): kind for kind in RegionKind}


def encode_head(header: BlockHeader, regions: Sequence[FileRegion], *, begin: int = 0) -> tuple[bytes, int]:
    """Return the head's bytes and its checksum; `begin` is where the first region's offset counts from."""
    entries = {
        f"{region.kind}.{tensor.name}": {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.offset - begin, tensor.offset - begin + tensor.size_bytes),
        }
        for region in regions
        for tensor in region.tensors
    }
    metadata = {
        "format": FORMAT,
        "layout_abi": str(LAYOUT_ABI),
        "hash": header.hash.hex(),
        "parent": header.parent.hex(),
        "fingerprint": header.fingerprint.hex(),
        "start_token_index": str(header.start_token_index),
        "block_token_limit": str(header.block_token_limit),
        "token_ids": pack_tokens(header.token_ids).hex(),
        "extra": header.extra.hex(),
        "regions": regions_to_json(regions, begin=begin),
    }
    return assemble_head(metadata, entries)


def assemble_head(metadata: Mapping[str, str], tensors: Mapping[str, object]) -> tuple[bytes, int]:
    """Return a head that begins with its checksum, and the checksum."""
    text = {"__metadata__": {"header_xxh3": _ZEROS.decode(), **metadata}, **tensors}
    body = json.dumps(text, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _ALIGNMENT_BYTES)
    head = len(body).to_bytes(8, "little") + body
    assert head[8:_CHECKSUM_AT] == _HEAD, "The checksum's place moved"
    assert len(head) <= HEADER_LIMIT_BYTES, f"Header of {len(head)} bytes exceeds {HEADER_LIMIT_BYTES}"
    checksum = xxhash.xxh3_64_intdigest(head)
    return head[:_CHECKSUM_AT] + b"%016x" % checksum + head[_CHECKSUM_AT + 16 :], checksum


def parse_head(
    head: bytes, *, file_bytes: int, data_offset: int | None = None, name_secret: bytes = b""
) -> BlockFile:
    """Return the facts in a file's head (length and JSON), or raise `BlockFileError`.

    Nothing in `head` is believed: every number is bounded by the file's real size, and
    the tensors must fill the file exactly, in region order, without gap or overlap.
    `data_offset` is where the first region begins, by default right behind this head.
    """
    data_offset = len(head) if data_offset is None else data_offset
    if len(head) != head_length(head, file_bytes=file_bytes):
        raise BlockFileError(Damage.TRUNCATED, f"Head has {len(head)} bytes, not what its length says")
    checksum = check_head(head)
    try:
        metadata, tensors = _split(head, data_offset=data_offset)
        if metadata["format"] != FORMAT:
            raise BlockFileError(Damage.HEADER, f"Format is {metadata['format']!r}, not {FORMAT!r}")
        check_abi(metadata)
        header = _parse_header(metadata)
        regions = _with_tensors(parse_regions(metadata["regions"], data_offset=data_offset), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BlockFileError(Damage.HEADER, f"Header cannot be understood: {error!r}") from error
    check_end(regions, data_offset=data_offset, file_bytes=file_bytes)
    expected = block_hash(
        parent=header.parent, token_ids=header.token_ids, extra=header.extra, secret=name_secret
    )
    if header.hash != expected:
        raise BlockFileError(Damage.HEADER, f"Hash {header.hash.hex()} is not that of the token ids")
    return BlockFile(
        outline=BlockOutline.of(header),
        header=header,
        regions=regions,
        file_bytes=file_bytes,
        header_checksum=checksum,
    )


def regions_to_json(regions: Sequence[FileRegion], *, begin: int = 0) -> str:
    """Return offsets (from `begin` of the file), bytes, checksums and tags of regions as text."""
    return json.dumps(
        [
            {
                "kind": r.kind,
                "offset": r.offset - begin,
                "size_bytes": r.size_bytes,
                "xxh3": f"{r.checksum:016x}",
                **({"tag": r.tag.hex()} if r.tag else {}),
            }
            for r in regions
        ],
        separators=(",", ":"),
    )


def head_length(start: bytes | bytearray, *, file_bytes: int) -> int:
    """Return the length of the head (8 + JSON) that the file's first bytes claim, if it can be true."""
    if len(start) < 8:
        raise BlockFileError(Damage.TRUNCATED, f"File has {file_bytes} bytes, fewer than a header length")
    head_bytes = 8 + int.from_bytes(start[:8], "little")
    if head_bytes > HEADER_LIMIT_BYTES or head_bytes % _ALIGNMENT_BYTES:
        raise BlockFileError(Damage.HEADER, f"Header length {head_bytes - 8} is impossible")
    if head_bytes > file_bytes:
        raise BlockFileError(Damage.TRUNCATED, f"Header of {head_bytes} bytes in a file of {file_bytes}")
    return head_bytes


def check_head(head: bytes) -> int:
    """Return the header's checksum after proving it."""
    if head[8:_CHECKSUM_AT] != _HEAD:
        raise BlockFileError(Damage.HEADER, "Header does not begin as a block file's")
    stored = head[_CHECKSUM_AT : _CHECKSUM_AT + 16]
    checksum = xxhash.xxh3_64_intdigest(head[:_CHECKSUM_AT] + _ZEROS + head[_CHECKSUM_AT + 16 :])
    if stored != b"%016x" % checksum:
        raise BlockFileError(Damage.HEADER, f"Header checksum is {checksum:016x}, the file says {stored!r}")
    return checksum


def _split(
    head: bytes, *, data_offset: int
) -> tuple[dict[str, str], Sequence[tuple[RegionKind, FileTensor]]]:
    """Return a head's metadata and its tensors, parsed apart.

    All blocks of one model describe their tensors with the same text, so that part is parsed
    once and remembered by its bytes. A `"},"` cannot occur inside the metadata's values, where
    quotes are escaped; should the text not fall apart there, neither part is valid JSON.
    """
    metadata_text, _, tensors_text = head[len(_METADATA_KEY) + 8 :].partition(b'"},"')
    if not tensors_text:
        return json.loads(head[8:])["__metadata__"], ()
    metadata = json.loads(metadata_text + b'"}')
    return metadata, _parse_tensors(b'{"' + tensors_text, data_offset=data_offset)


@functools.lru_cache(maxsize=64)
def _parse_tensors(text: bytes, *, data_offset: int) -> tuple[tuple[RegionKind, FileTensor], ...]:
    entries = json.loads(text)
    return tuple(_parse_tensor(key, entry, data_offset=data_offset) for key, entry in entries.items())


def _parse_header(metadata: dict[str, str]) -> BlockHeader:
    digests = [bytes.fromhex(metadata[key]) for key in ("hash", "parent", "fingerprint")]
    if any(len(digest) != 32 for digest in digests):
        raise ValueError("a digest is not 32 bytes long")
    header = BlockHeader(
        hash=BlockHash(digests[0]),
        parent=BlockHash(digests[1]),
        fingerprint=Fingerprint(digests[2]),
        start_token_index=int(metadata["start_token_index"]),
        token_ids=unpack_tokens(bytes.fromhex(metadata["token_ids"])),
        block_token_limit=int(metadata["block_token_limit"]),
        extra=bytes.fromhex(metadata["extra"]),
    )
    check_place(BlockOutline.of(header))
    return header


def check_place(outline: BlockOutline) -> None:
    """Raise ValueError for a block that no prompt could have: a row would have no room for its numbers."""
    count, limit = outline.token_count, outline.block_token_limit
    if not (0 < count <= limit <= _TOKEN_LIMIT and 0 <= outline.start_token_index <= _TOKEN_LIMIT):
        raise ValueError(f"{count} of {limit} tokens at {outline.start_token_index} cannot be a block")


def check_abi(metadata: Mapping[str, str]) -> None:
    """Raise `BlockFileError` for a file of another layout."""
    if metadata["layout_abi"] != str(LAYOUT_ABI):
        raise BlockFileError(Damage.OTHER_ABI, f"Layout ABI is {metadata['layout_abi']}, not {LAYOUT_ABI}")


def check_end(regions: Sequence[FileRegion], *, data_offset: int, file_bytes: int) -> None:
    """Raise `BlockFileError` for a file that does not end where its last region does."""
    end = regions[-1].offset + regions[-1].size_bytes if regions else data_offset
    if end != file_bytes:
        raise BlockFileError(Damage.TRUNCATED, f"File has {file_bytes} bytes, its header says {end}")


def parse_regions(text: str, *, data_offset: int) -> tuple[FileRegion, ...]:
    """Return regions, in order and without a gap, but for their tensors. Raises what damaged text does."""
    regions: list[FileRegion] = []
    offset = data_offset
    for item in json.loads(text):
        region = FileRegion(
            kind=RegionKind(str(item["kind"])),
            offset=int(item["offset"]) + data_offset,
            size_bytes=int(item["size_bytes"]),
            checksum=int(str(item["xxh3"]), 16),
            tensors=(),
            tag=bytes.fromhex(str(item.get("tag", ""))),
        )
        if region.offset != offset or region.size_bytes < 0:
            raise ValueError(f"region {region.kind} begins at {region.offset}, not at {offset}")
        offset += region.size_bytes
        regions.append(region)
    if any(REGION_ORDER.index(a.kind) >= REGION_ORDER.index(b.kind) for a, b in pairwise(regions)):
        raise ValueError("regions are out of order")
    return tuple(regions)


def _with_tensors(
    regions: Sequence[FileRegion], tensors: Sequence[tuple[RegionKind, FileTensor]]
) -> tuple[FileRegion, ...]:
    """Return the regions with their tensors, which fill each of them in order."""
    found = []
    for region in regions:
        inside = tuple(tensor for kind, tensor in tensors if kind is region.kind)
        offset = region.offset
        for tensor in inside:
            if tensor.offset != offset:
                raise ValueError(f"{region.kind}.{tensor.name} begins at {tensor.offset}, not at {offset}")
            offset += tensor.size_bytes
        if offset != region.offset + region.size_bytes:
            raise ValueError(f"region {region.kind} does not hold its tensors exactly")
        found.append(dataclasses.replace(region, tensors=inside))
    if sum(len(region.tensors) for region in found) != len(tensors):
        raise ValueError("a tensor lies outside of all regions")
    return tuple(found)


_INT_ONLY = {int}


def _parse_tensor(key: str, entry: dict[str, object], *, data_offset: int) -> tuple[RegionKind, FileTensor]:
    kind, _, name = key.partition(".")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise ValueError(f"{key} is not described as a tensor")
    start, end = offsets
    numbers = (*shape, start, end)
    if set(map(type, numbers)) != _INT_ONLY or min(numbers) < 0 or max(shape, default=0) > _DIMENSION_LIMIT:
        raise ValueError(f"{key} has a size that no array has")
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{key} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return _KINDS[kind], FileTensor(name, dtype, tuple(shape), start + data_offset, end - start)
