"""Header of an encrypted block file: what everybody may read, and what only the key opens.

The file stays a safetensors file: one opaque tensor of bytes per region. Its metadata holds the
block's outline, the key's id, the file's salt, and for each region its position, the xxh3 of the
encrypted bytes, and the tag. So without the key one can still weigh, list, check and evict
blocks. `sealed` is the header as it would be in the clear (tokens, tensors), encrypted, with the
outline as additional authenticated data. Outside and inside must agree, so no change goes
unnoticed by those who have the key.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence

from icehouse_server.domain.blocks import LAYOUT_ABI, BlockHeader, Damage
from icehouse_server.storage.local.block_format.header import (
    CHECKSUM_OFFSET,
    BlockFile,
    BlockFileError,
    BlockOutline,
    FileRegion,
    assemble_head,
    check_abi,
    check_end,
    check_head,
    encode_head,
    parse_bytes,
    parse_head,
    parse_outline,
    parse_regions,
    parsing_errors,
    regions_to_json,
)
from icehouse_server.storage.local.encryption.constants import (
    KEY_ID_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    Cipher,
    FileCipher,
)

FORMAT = "icehouse.block.sealed"
_FORMAT_TEXT = b'","format":"icehouse.block.sealed",'
_FORMAT_OFFSET = CHECKSUM_OFFSET + 16


def is_encrypted_header(head: bytes) -> bool:
    """Return whether a head begins as an encrypted file's."""
    return head.startswith(_FORMAT_TEXT, _FORMAT_OFFSET)


def file_cipher_of(cipher: Cipher, outline: BlockOutline, *, salt: bytes) -> FileCipher:
    """Return the encryption of one file, with every part of it bound to the public facts."""
    facts = json.dumps(_public(outline, key_id=cipher.key_id, salt=salt), separators=(",", ":"))
    return cipher.file(salt=salt, facts=facts.encode())


def encode_encrypted_header(
    header: BlockHeader, regions: Sequence[FileRegion], file_cipher: FileCipher
) -> tuple[bytes, int]:
    """Return the head's bytes and its checksum."""
    inside, _ = encode_head(header, regions)
    begin = regions[0].offset if regions else 0
    metadata = {
        **_public(BlockOutline.of(header), key_id=file_cipher.key_id, salt=file_cipher.salt),
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

    Raises `BlockFileError`; nothing in `head` is trusted.
    """
    checksum = check_head(head, file_bytes=file_bytes)
    with parsing_errors():
        metadata = json.loads(head[8:])["__metadata__"]
        check_abi(metadata)
        outline = parse_outline(metadata, token_count=int(metadata["token_count"]))
        key_id = parse_bytes(metadata["key"], size_bytes=KEY_ID_BYTES)
        salt = parse_bytes(metadata["salt"], size_bytes=SALT_BYTES)
        regions = parse_regions(metadata["regions"], data_offset=len(head))
        if any(len(region.tag) != TAG_BYTES for region in regions):
            raise ValueError("a tag has the wrong length")
        encrypted = base64.b64decode(metadata["sealed"], validate=True)
    check_end(regions, data_offset=len(head), file_bytes=file_bytes)
    outside = BlockFile(outline, None, regions, file_bytes, checksum, key_id)
    if cipher is None or cipher.key_id != key_id:
        return outside
    file_cipher = file_cipher_of(cipher, outline, salt=salt)
    text = file_cipher.decrypt_header(encrypted)
    if text is None:
        raise BlockFileError(Damage.AUTH_TAG, "Header is not what was encrypted under this key")
    inside = parse_head(text, file_bytes=file_bytes, data_offset=len(head), name_secret=cipher.name_secret)
    bare = tuple(dataclasses.replace(region, tensors=()) for region in inside.regions)
    if (inside.outline, bare) != (outline, regions):
        raise BlockFileError(Damage.AUTH_TAG, "The public and the encrypted part of the header differ")
    return dataclasses.replace(outside, header=inside.header, regions=inside.regions, cipher=file_cipher)


def _public(outline: BlockOutline, *, key_id: bytes, salt: bytes) -> dict[str, str]:
    return {
        "format": FORMAT,
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
