"""Header of a block file: what a block is and where its tensors are, to bytes and back.

Pure functions over bytes; `block_file` says what the file is and why. Nothing that comes from a disk is
trusted here: see `parse_head`.

An encrypted block file is still a safetensors file: one opaque tensor of bytes per region. Its metadata holds
the block's outline, the key's id, the file's salt, and for each region its position, the xxh3 of the
encrypted bytes, and the tag. So without the key one can still measure, list, check and evict blocks. `sealed`
is the unencrypted header (tokens, tensors), encrypted, with the outline as additional authenticated data.
Outside and inside must agree, so anybody with the key notices every change.

In a block file with any region in byte planes, every region is one opaque tensor to safetensors; the metadata
lists the tensors.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import xxhash

from icehouse_server.domain.blocks import (
    LAYOUT_ABI,
    BlockDamage,
    BlockHeader,
    RegionKind,
    block_hash,
    pack_tokens,
    unpack_tokens,
)
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.api import TensorShape
from icehouse_server.storage.local.block_format.file_region import (
    FileRegion,
    parse_regions,
    regions_to_json,
)
from icehouse_server.storage.local.encryption.constants import (
    KEY_ID_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    Cipher,
    FileCipher,
)

_FORMAT = "icehouse.block"
_ENCRYPTED_FORMAT = "icehouse.block.sealed"
_ENCRYPTED_START = b'","format":"icehouse.block.sealed",'
_HEADER_LIMIT_BYTES = 8 << 20
"""No real header is longer: 512 layers of five tensors need a tenth of it."""
_TOKEN_LIMIT = 1 << 40
"""More than any prompt has."""
_ALIGNMENT_BYTES = 8
_METADATA_KEY = b'{"__metadata__":'
_HEAD = _METADATA_KEY + b'{"header_xxh3":"'
_ZEROS = b"0" * 16
_CHECKSUM_OFFSET = 8 + len(_HEAD)

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64"), 8),
}
"""Bytes per element of the safetensors dtypes that a cache can hold, and no others."""
_DIMENSION_LIMIT = 2**31 - 1
"""Largest dimension of an MLX array; nothing else bounds that of an empty tensor."""


class BlockFileError(Exception):
    """A file is not a complete, valid block file of this layout ABI."""

    def __init__(self, damage: BlockDamage, message: str) -> None:
        super().__init__(message)
        self.damage = damage


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOutline:
    """A block's header without its tokens; not secret."""

    hash: BlockHash
    parent: BlockHash
    fingerprint: Fingerprint
    start_token_index: int
    token_count: int
    block_token_limit: int

    @classmethod
    def of(cls, header: BlockHeader) -> BlockOutline:
        return cls(**{field.name: getattr(header, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFile:
    """All facts of one block file without its tensor bytes."""

    outline: BlockOutline
    header: BlockHeader | None
    """None if the file is encrypted under an unknown key."""
    regions: tuple[FileRegion, ...]
    file_bytes: int
    header_checksum: int
    key_id: bytes = b""
    """The key it is encrypted under; empty for an unencrypted file."""
    cipher: FileCipher | None = dataclasses.field(default=None, repr=False, compare=False)
    """Decrypts its regions."""

    def region_bytes(self, kind: RegionKind) -> int:
        """Return the tensors' bytes in the region of this kind; 0 if the block has none."""
        return sum(region.size_bytes for region in self.regions if region.kind is kind)


def file_cipher_of(cipher: Cipher, outline: BlockOutline, *, salt: bytes) -> FileCipher:
    """Return the encryption of one file, which binds every part of it to the public facts."""
    public = _public(outline, key_id=cipher.key_id, salt=salt)
    return cipher.file(salt=salt, facts=json.dumps(public, separators=(",", ":")).encode())


def encode_head(
    header: BlockHeader,
    regions: Sequence[FileRegion],
    cipher: FileCipher | None = None,
    *,
    head_bytes: int = 0,
) -> tuple[bytes, int]:
    """Return the head, at least `head_bytes` long, and its checksum; with a cipher it is encrypted."""
    begin = regions[0].offset if regions else 0
    if cipher is None:
        return _encode_clear(header, regions, begin=begin, head_bytes=head_bytes)
    inside, _ = _encode_clear(header, regions, begin=begin)
    metadata = {
        **_public(BlockOutline.of(header), key_id=cipher.key_id, salt=cipher.salt),
        "regions": regions_to_json(regions, begin=begin, is_public=True),
        "sealed": base64.b64encode(cipher.encrypt_header(inside)).decode(),
    }
    return assemble_head(metadata, _opaque(regions, begin=begin), head_bytes=head_bytes)


def _opaque(regions: Sequence[FileRegion], *, begin: int) -> dict[str, object]:
    """Describe each region as a tensor of bytes."""
    return {
        str(region.kind): {
            "dtype": "U8",
            "shape": (region.stored_bytes,),
            "data_offsets": (region.offset - begin, region.offset - begin + region.stored_bytes),
        }
        for region in regions
    }


def _encode_clear(
    header: BlockHeader, regions: Sequence[FileRegion], *, begin: int, head_bytes: int = 0
) -> tuple[bytes, int]:
    tensors: dict[str, object] = {}
    offset = 0
    for region in regions:
        for tensor in region.tensors:
            tensors[f"{region.kind}.{tensor.name}"] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (offset, offset + tensor.size_bytes),
            }
            offset += tensor.size_bytes
    metadata = {
        "format": _FORMAT,
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
    if any(region.planes for region in regions):
        metadata["tensors"] = json.dumps(tensors, separators=(",", ":"))
        tensors = _opaque(regions, begin=begin)
    return assemble_head(metadata, tensors, head_bytes=head_bytes)


def _public(outline: BlockOutline, *, key_id: bytes, salt: bytes) -> dict[str, str]:
    return {
        "format": _ENCRYPTED_FORMAT,
        "layout_abi": str(LAYOUT_ABI),
        "hash": outline.hash.hex(),
        "parent": outline.parent.hex(),
        "fingerprint": outline.fingerprint.hex(),
        "start_token_index": str(outline.start_token_index),
        "token_count": str(outline.token_count),
        "block_token_limit": str(outline.block_token_limit),
        "key": key_id.hex(),
        "salt": salt.hex(),
    }


def assemble_head(
    metadata: Mapping[str, str], tensors: Mapping[str, object], *, head_bytes: int = 0
) -> tuple[bytes, int]:
    """Return a head of at least `head_bytes` that begins with its checksum, and the checksum."""
    text = {"__metadata__": {"header_xxh3": _ZEROS.decode(), **metadata}, **tensors}
    body = json.dumps(text, separators=(",", ":")).encode()
    body += b" " * max(head_bytes - 8 - len(body), -len(body) % _ALIGNMENT_BYTES)
    head = len(body).to_bytes(8, "little") + body
    assert head[8:_CHECKSUM_OFFSET] == _HEAD, "The checksum's position moved"
    assert len(head) <= _HEADER_LIMIT_BYTES, f"Header of {len(head)} bytes exceeds {_HEADER_LIMIT_BYTES}"
    checksum = xxhash.xxh3_64_intdigest(head)
    return head[:_CHECKSUM_OFFSET] + b"%016x" % checksum + head[_CHECKSUM_OFFSET + 16 :], checksum


def parse_head(head: bytes, *, file_bytes: int, cipher: Cipher | None = None) -> BlockFile:
    """Return the facts in a file's head (length and JSON), the encrypted ones too if `cipher` has its key.

    Raises `BlockFileError`. Nothing in `head` is trusted: every number is bounded by the file's real size,
    and the tensors must fill the file exactly, in region order, without gap or overlap.
    """
    if not head.startswith(_ENCRYPTED_START, _CHECKSUM_OFFSET + 16):
        return _parse_clear(head, file_bytes=file_bytes, data_offset=len(head), name_secret=b"")
    checksum = _check_head(head, file_bytes=file_bytes)
    with _parsing_errors():
        metadata = json.loads(head[8:])["__metadata__"]
        _check_abi(metadata)
        outline = _parse_outline(metadata, token_count=int(metadata["token_count"]))
        key_id = _parse_bytes(metadata["key"], size_bytes=KEY_ID_BYTES)
        salt = _parse_bytes(metadata["salt"], size_bytes=SALT_BYTES)
        regions = parse_regions(metadata["regions"], data_offset=len(head))
        if any(len(region.tag) != TAG_BYTES for region in regions):
            raise ValueError("a tag has the wrong length")
        encrypted = base64.b64decode(metadata["sealed"], validate=True)
    _check_end(regions, data_offset=len(head), file_bytes=file_bytes)
    outside = BlockFile(outline, None, regions, file_bytes, checksum, key_id)
    if cipher is None or cipher.key_id != key_id:
        return outside
    file_cipher = file_cipher_of(cipher, outline, salt=salt)
    text = file_cipher.decrypt_header(encrypted)
    if text is None:
        raise BlockFileError(BlockDamage.AUTH_TAG, "Header is not what was encrypted under this key")
    inside = _parse_clear(text, file_bytes=file_bytes, data_offset=len(head), name_secret=cipher.name_secret)
    bare = tuple(map(_public_region, inside.regions))
    if (inside.outline, bare) != (outline, regions):
        raise BlockFileError(BlockDamage.AUTH_TAG, "The public and the encrypted part of the header differ")
    return dataclasses.replace(outside, header=inside.header, regions=inside.regions, cipher=file_cipher)


def _public_region(region: FileRegion) -> FileRegion:
    """Return what a reader without the key knows about a region."""
    planes = region.planes and dataclasses.replace(region.planes, checksum=None)
    return dataclasses.replace(region, tensors=(), planes=planes)


def _parse_clear(head: bytes, *, file_bytes: int, data_offset: int, name_secret: bytes) -> BlockFile:
    """Return the facts in an unencrypted head; the first region of its file begins at `data_offset`."""
    checksum = _check_head(head, file_bytes=file_bytes)
    with _parsing_errors():
        metadata, tensors_text = _split(head)
        if metadata["format"] != _FORMAT:
            raise BlockFileError(BlockDamage.HEADER, f"Format is {metadata['format']!r}, not {_FORMAT!r}")
        _check_abi(metadata)
        token_ids = unpack_tokens(bytes.fromhex(metadata["token_ids"]))
        outline = _parse_outline(metadata, token_count=len(token_ids))
        header = BlockHeader(
            hash=outline.hash,
            parent=outline.parent,
            fingerprint=outline.fingerprint,
            start_token_index=outline.start_token_index,
            token_ids=token_ids,
            block_token_limit=outline.block_token_limit,
            extra=bytes.fromhex(metadata["extra"]),
        )
        regions = parse_regions(metadata["regions"], data_offset=data_offset)
        if any(region.planes and region.planes.checksum is None for region in regions):
            raise ValueError("a region in byte planes lacks the checksum of its tensors")
        if any(region.planes for region in regions):
            tensors_text = metadata["tensors"].encode()
        regions = _with_tensors(regions, _parse_tensors(tensors_text))
    _check_end(regions, data_offset=data_offset, file_bytes=file_bytes)
    expected = block_hash(
        parent=header.parent, token_ids=header.token_ids, extra=header.extra, secret=name_secret
    )
    if header.hash != expected:
        raise BlockFileError(BlockDamage.HEADER, f"Hash {header.hash.hex()} is not that of the token ids")
    return BlockFile(outline, header, regions, file_bytes, checksum)


@contextlib.contextmanager
def _parsing_errors() -> Iterator[None]:
    """Raise `BlockFileError` for whatever parsing a damaged header may raise."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BlockFileError(BlockDamage.HEADER, f"Header cannot be understood: {error!r}") from error


def head_length(start: bytes | bytearray, *, file_bytes: int) -> int:
    """Return the length of the head (8 + JSON) that the file's first bytes claim. Raises `BlockFileError`."""
    if len(start) < 8:
        raise BlockFileError(
            BlockDamage.TRUNCATED, f"File has {file_bytes} bytes, fewer than a header length"
        )
    head_bytes = 8 + int.from_bytes(start[:8], "little")
    if head_bytes > _HEADER_LIMIT_BYTES or head_bytes % _ALIGNMENT_BYTES:
        raise BlockFileError(BlockDamage.HEADER, f"Header length {head_bytes - 8} is impossible")
    if head_bytes > file_bytes:
        raise BlockFileError(BlockDamage.TRUNCATED, f"Header of {head_bytes} bytes in a file of {file_bytes}")
    return head_bytes


def _check_head(head: bytes, *, file_bytes: int) -> int:
    """Check the header's checksum and length; return the checksum."""
    if len(head) != head_length(head, file_bytes=file_bytes):
        raise BlockFileError(BlockDamage.TRUNCATED, f"Head has {len(head)} bytes, not what its length says")
    if head[8:_CHECKSUM_OFFSET] != _HEAD:
        raise BlockFileError(BlockDamage.HEADER, "Header does not begin as a block file's")
    stored = head[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 16]
    checksum = xxhash.xxh3_64_intdigest(head[:_CHECKSUM_OFFSET] + _ZEROS + head[_CHECKSUM_OFFSET + 16 :])
    if stored != b"%016x" % checksum:
        raise BlockFileError(
            BlockDamage.HEADER, f"Header checksum is {checksum:016x}, the file says {stored!r}"
        )
    return checksum


def _check_abi(metadata: Mapping[str, str]) -> None:
    """Raise `BlockFileError` for another layout ABI."""
    if metadata["layout_abi"] != str(LAYOUT_ABI):
        raise BlockFileError(
            BlockDamage.OTHER_ABI, f"Layout ABI is {metadata['layout_abi']}, not {LAYOUT_ABI}"
        )


def _check_end(regions: Sequence[FileRegion], *, data_offset: int, file_bytes: int) -> None:
    """Raise `BlockFileError` if the file does not end where its last region does."""
    end = regions[-1].offset + regions[-1].stored_bytes if regions else data_offset
    if end != file_bytes:
        raise BlockFileError(BlockDamage.TRUNCATED, f"File has {file_bytes} bytes, its header says {end}")


def _parse_outline(metadata: Mapping[str, str], *, token_count: int) -> BlockOutline:
    """Return a block's outline. Raises ValueError for a block that no prompt can have, because its numbers
    would not fit the manifest's columns."""
    digests = [_parse_bytes(metadata[key], size_bytes=32) for key in ("hash", "parent", "fingerprint")]
    start, limit = int(metadata["start_token_index"]), int(metadata["block_token_limit"])
    if not (0 < token_count <= limit <= _TOKEN_LIMIT and 0 <= start <= _TOKEN_LIMIT):
        raise ValueError(f"{token_count} of {limit} tokens at {start} cannot be a block")
    return BlockOutline(
        BlockHash(digests[0]), BlockHash(digests[1]), Fingerprint(digests[2]), start, token_count, limit
    )


def _parse_bytes(text: str, *, size_bytes: int) -> bytes:
    """Return `size_bytes` bytes from hexadecimal text, or raise ValueError."""
    data = bytes.fromhex(text)
    if len(data) != size_bytes:
        raise ValueError(f"{len(data)} bytes, where {size_bytes} were due")
    return data


_Tensors = Mapping[str, tuple[int, int, list[TensorShape]]]
"""By region: where the first tensor begins and the last one ends, and all of them in order."""


def _split(head: bytes) -> tuple[dict[str, str], bytes]:
    """Return a head's metadata and the text of its tensors, which is parsed separately.

    All blocks of one model describe their tensors with the same text, so that part is parsed
    once and cached by its bytes. A `"},"` cannot occur inside the metadata's values, where
    quotes are escaped; if the text is split elsewhere, neither part is valid JSON.
    """
    metadata_text, _, tensors_text = head[len(_METADATA_KEY) + 8 :].partition(b'"},"')
    if not tensors_text:
        return json.loads(head[8:])["__metadata__"], b"{}"
    return json.loads(metadata_text + b'"}'), b'{"' + tensors_text


@functools.lru_cache(maxsize=64)
def _parse_tensors(text: bytes) -> _Tensors:
    regions: dict[str, tuple[int, int, list[TensorShape]]] = {}
    for key, entry in json.loads(text).items():
        kind, _, name = key.partition(".")
        start, tensor = _parse_tensor(name, entry)
        begin, end, tensors = regions.get(kind, (start, start, []))
        if start != end:
            raise ValueError(f"{key} begins at {start}, not at {end}")
        tensors.append(tensor)
        regions[kind] = begin, end + tensor.size_bytes, tensors
    return regions


def _parse_tensor(name: str, entry: dict[str, object]) -> tuple[int, TensorShape]:
    """Return a tensor's offset among all tensors of the block, and its shape."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise ValueError(f"{name} is not described as a tensor")
    start, end = offsets
    numbers = (*shape, start, end)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(shape, default=0) > _DIMENSION_LIMIT:
        raise ValueError(f"{name} has a size that no array has")
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return start, TensorShape(name, dtype, tuple(shape), end - start)


def _with_tensors(regions: Sequence[FileRegion], tensors: _Tensors) -> tuple[FileRegion, ...]:
    """Return the regions with their tensors, which must fill each region in order."""
    if not tensors.keys() <= {region.kind for region in regions}:
        raise ValueError("a tensor lies outside of all regions")
    filled = []
    region_begin = 0
    for region in regions:
        begin, end, inside = tensors.get(region.kind, (region_begin, region_begin, []))
        if (begin, end - begin) != (region_begin, region.size_bytes):
            raise ValueError(f"region {region.kind} does not hold its tensors exactly")
        filled.append(dataclasses.replace(region, tensors=tuple(inside)))
        region_begin += region.size_bytes
    return tuple(filled)
