"""Header of an encrypted block file: what everybody may read, and what only the key opens.

The file stays a safetensors file: one opaque tensor of bytes per region. Its metadata tells the
block's outline, the key's id, the file's salt, and of each region the place, the xxh3 of the
bytes as they lie there, and the tag. So whoever has no key can still weigh, list, check and
evict blocks; `sealed` is the head as it would be in the clear (tokens, tensors), encrypted,
with the outline as additional authenticated data. What the outside says must be what the
inside says, so nothing of it can be changed unnoticed by those who have the key.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence

from icehouse_server.domain.blocks import LAYOUT_ABI, BlockHeader, Damage
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.local.block_format.damage import BlockFileError
from icehouse_server.storage.local.block_format.facts import BlockFile, BlockOutline, FileRegion
from icehouse_server.storage.local.block_format.header import (
    assemble_head,
    check_abi,
    check_end,
    check_head,
    check_place,
    encode_head,
    head_length,
    parse_head,
    parse_regions,
    regions_to_json,
)
from icehouse_server.storage.local.encryption.facts import (
    KEY_ID_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    Cipher,
    FileCipher,
)

FORMAT = "icehouse.block.sealed"
_BEGIN = b'","format":"icehouse.block.sealed",'
_BEGIN_AT = 8 + len(b'{"__metadata__":{"header_xxh3":"') + 16


@dataclasses.dataclass(frozen=True, slots=True)
class FileKey:
    """Under which key and with which salt one file is encrypted."""

    key_id: bytes
    salt: bytes

    def facts(self, outline: BlockOutline) -> bytes:
        """Return the bytes that every part of the file is bound to."""
        return json.dumps(_public(outline, self), separators=(",", ":")).encode()


def is_encrypted_header(head: bytes) -> bool:
    """Say whether a head begins as an encrypted file's."""
    return head[_BEGIN_AT : _BEGIN_AT + len(_BEGIN)] == _BEGIN


def encode_encrypted_header(
    header: BlockHeader,
    regions: Sequence[FileRegion],
    *,
    file_key: FileKey,
    file_cipher: FileCipher,
    begin: int = 0,
) -> tuple[bytes, int]:
    """Return the head's bytes and its checksum; `begin` is where the first region's offset counts from."""
    inside, _ = encode_head(header, regions, begin=begin)
    metadata = {
        **_public(BlockOutline.of(header), file_key),
        "regions": regions_to_json(regions, begin=begin),
        "sealed": base64.b64encode(file_cipher.encrypt_header(inside)).decode(),
    }
    tensors = {
        str(region.kind): {
            "dtype": "U8",
            "shape": (region.size_bytes,),
            "data_offsets": (region.offset - begin, region.offset - begin + region.size_bytes),
        }
        for region in regions
    }
    return assemble_head(metadata, tensors)


def parse_encrypted_header(head: bytes, *, file_bytes: int, cipher: Cipher | None) -> BlockFile:
    """Return the facts in an encrypted file's head, those inside too when `cipher` has its key.

    Raises `BlockFileError`; nothing in `head` is believed.
    """
    if len(head) != head_length(head, file_bytes=file_bytes):
        raise BlockFileError(Damage.TRUNCATED, f"Head has {len(head)} bytes, not what its length says")
    checksum = check_head(head)
    try:
        metadata = json.loads(head[8:])["__metadata__"]
        check_abi(metadata)
        outline = _parse_outline(metadata)
        file_key = FileKey(_bytes_of(metadata["key"], KEY_ID_BYTES), _bytes_of(metadata["salt"], SALT_BYTES))
        regions = parse_regions(metadata["regions"], data_offset=len(head))
        if any(len(region.tag) != TAG_BYTES for region in regions):
            raise ValueError("a tag is not of its length")
        encrypted = base64.b64decode(metadata["sealed"], validate=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BlockFileError(Damage.HEADER, f"Header cannot be understood: {error!r}") from error
    check_end(regions, data_offset=len(head), file_bytes=file_bytes)
    outside = BlockFile(outline, None, regions, file_bytes, checksum, file_key.key_id)
    if cipher is None or cipher.key_id != file_key.key_id:
        return outside
    file_cipher = cipher.file(salt=file_key.salt, facts=file_key.facts(outline))
    inside = _open(encrypted, outside, file_cipher=file_cipher, data_offset=len(head), cipher=cipher)
    return dataclasses.replace(outside, header=inside.header, regions=inside.regions, cipher=file_cipher)


def _open(
    encrypted: bytes, outside: BlockFile, *, file_cipher: FileCipher, data_offset: int, cipher: Cipher
) -> BlockFile:
    """Return what the private part says, which must be what the public one says and more."""
    text = file_cipher.decrypt_header(encrypted)
    if text is None:
        raise BlockFileError(Damage.AUTH_TAG, "Header is not what was encrypted under this key")
    inside = parse_head(
        text, file_bytes=outside.file_bytes, data_offset=data_offset, name_secret=cipher.name_secret
    )
    bare = tuple(dataclasses.replace(region, tensors=()) for region in inside.regions)
    if inside.outline != outside.outline or bare != outside.regions:
        raise BlockFileError(Damage.AUTH_TAG, "Header says something else outside than inside")
    return inside


def _public(outline: BlockOutline, file_key: FileKey) -> dict[str, str]:
    return {
        "format": FORMAT,
        "layout_abi": str(LAYOUT_ABI),
        "hash": outline.hash.hex(),
        "parent": outline.parent.hex(),
        "fingerprint": outline.fingerprint.hex(),
        "start_token_index": str(outline.start_token_index),
        "token_count": str(outline.token_count),
        "block_token_limit": str(outline.block_token_limit),
        "key": file_key.key_id.hex(),
        "salt": file_key.salt.hex(),
    }


def _parse_outline(metadata: dict[str, str]) -> BlockOutline:
    names = [_bytes_of(metadata[key], 32) for key in ("hash", "parent", "fingerprint")]
    outline = BlockOutline(
        hash=BlockHash(names[0]),
        parent=BlockHash(names[1]),
        fingerprint=Fingerprint(names[2]),
        start_token_index=int(metadata["start_token_index"]),
        token_count=int(metadata["token_count"]),
        block_token_limit=int(metadata["block_token_limit"]),
    )
    check_place(outline)
    return outline


def _bytes_of(text: str, size_bytes: int) -> bytes:
    found = bytes.fromhex(text)
    if len(found) != size_bytes:
        raise ValueError(f"{len(found)} bytes, where {size_bytes} were due")
    return found
