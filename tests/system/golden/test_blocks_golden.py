"""Bytes that must never change: block hashes and the block file.

A change here orphans every cache on every disk. If the file's layout must change, raise
`LAYOUT_ABI` and add new vectors; the hashes may change only with their domain tags.
"""

from __future__ import annotations

import dataclasses
import hashlib

from icehouse_server.domain.blocks import (
    LAYOUT_ABI,
    BlockHeader,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
    block_hash,
    pack_tokens,
    root_hash,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint, Tenant
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import prepare_block, write_block
from icehouse_server.storage.local.encryption.aes_gcm import Cipher, unwrap_key
from icehouse_server.storage.store_paths import StorePaths

FINGERPRINT = Fingerprint(bytes(range(32)))

ROOT_VECTORS = [
    "2279753f326b104f82f96a966354709f80d82ee800b45a20e7caf370080339d7",
    "304e450ba9702026815a49169242ec77b907b325f76eaabc215c8dcd56f6fcf4",
    "dcaf610f8c6e4560da5e24a31b643e87e807e7844e9d1d8781d88bde2211ffb2",
]
CHAIN_VECTOR = "e7de53dc7c5a007d8f4694399f3bfdaa593e88004413770ee6a876e21ec28e03"
EXTRA_VECTOR = "2d5ca70ebb55c8b49ca63f56e8de90d827c13082a2818fb6437f14575ff29b52"
FILE_VECTOR = "c3621916f46bfbe49a71ac0a0b8a2c8740b49dfd67f71eaf49ae6b2d25d1a6dc"
KEY_ID_VECTOR = "c6b07c9526a3f31f"
NAME_SECRET_VECTOR = "efb4d94c3151390d154fd786c7ad36e7f5daca265e0028a338691da694c3850a"
ENCRYPTED_NAME_VECTOR = "31c51aa2468740ee805be6c9494974eb3b25a1f0cc3b10832b47615a4a1223bc"
ENCRYPTED_REGIONS_VECTOR = "bef458ed8b87e7c9cadb3d83cf4bdd149e512610ec49d528ab969bd0480d4c1fa63de8f4"
ENCRYPTED_FILE_VECTOR = "bb538f69ab6031192901adb5aa41a4f12575c5eee48c413b509835d4fc6c1171"
WRAPPED_KEY_VECTOR = "246d75815315bd8b40ac141ba1cbca56785ae73cbbafa7fd20f4c91a99312c946edff8132c8259b4"
GOLDEN_FILE = (
    b'{"__metadata__":{"header_xxh3":"eae965d5ddc017ff","format":"icehouse.block","lay'
    b'out_abi":"1","hash":"4c68c289268e4394405a2803074d0ce17ee02af1b16092c6339de1e512b'
    b'43ff1","parent":"2279753f326b104f82f96a966354709f80d82ee800b45a20e7caf370080339d'
    b'7","fingerprint":"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e'
    b'1f","start_token_index":"0","block_token_limit":"256","token_ids":"0100000002000'
    b'00003000000ffffffff","extra":"696d616765","regions":"[{\\"kind\\":\\"kv\\",\\"offset\\'
    b'":0,\\"size_bytes\\":32,\\"xxh3\\":\\"3523581fe96e4c05\\"},{\\"kind\\":\\"checkpoint\\",\\"'
    b'offset\\":32,\\"size_bytes\\":4,\\"xxh3\\":\\"988b7b9033ac4622\\"}]"},"kv.000.k":{"dtyp'
    b'e":"BF16","shape":[1,2,4,2],"data_offsets":[0,32]},"checkpoint.001.0":{"dtype":"'
    b'F32","shape":[],"data_offsets":[32,36]}}\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x01\x02\x03\x04'
)


def golden_block() -> HostBlock:
    root = root_hash(fingerprint=FINGERPRINT, tenant=DEFAULT_TENANT)
    token_ids = (1, 2, 3, 0xFFFFFFFF)
    header = BlockHeader(
        hash=block_hash(parent=root, token_ids=token_ids, extra=b"image"),
        parent=root,
        fingerprint=FINGERPRINT,
        start_token_index=0,
        token_ids=token_ids,
        block_token_limit=256,
        extra=b"image",
    )
    kv = bytes(range(32))
    return HostBlock(
        header,
        (
            HostRegion(RegionKind.KV, (HostTensor("000.k", "BF16", (1, 2, 4, 2), memoryview(kv)),)),
            HostRegion(RegionKind.CHECKPOINT, (HostTensor("001.0", "F32", (), memoryview(b"\1\2\3\4")),)),
        ),
    )


def test_hashes():
    root = root_hash(fingerprint=FINGERPRINT, tenant=DEFAULT_TENANT)
    other = root_hash(fingerprint=FINGERPRINT, tenant=Tenant("acme"))
    first = block_hash(parent=root, token_ids=[1, 2, 3])
    assert [name.hex() for name in (root, other, first)] == ROOT_VECTORS
    assert block_hash(parent=first, token_ids=range(256)).hex() == CHAIN_VECTOR
    assert block_hash(parent=first, token_ids=range(256), extra=b"x").hex() == EXTRA_VECTOR
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_file_bytes(tmp_path):
    files = Files()
    descriptor = files.create(str(tmp_path / "b"))
    file = write_block(files, descriptor, prepare_block(golden_block()))
    files.close(descriptor)
    written = (tmp_path / "b").read_bytes()
    assert LAYOUT_ABI == 1
    assert written[8:] == GOLDEN_FILE
    assert int.from_bytes(written[:8], "little") == len(GOLDEN_FILE) - 36
    assert hashlib.sha256(written).hexdigest() == FILE_VECTOR
    assert file.file_bytes == len(written)


def test_file_name():
    block = golden_block()
    assert StorePaths("/cache").block(FINGERPRINT, block.header.hash) == (
        f"/cache/blocks/0001020304050607/{block.header.hash.hex()}.safetensors"
    )


def test_encrypted_file_bytes(tmp_path):
    """What a key encrypted once, this key opens for ever."""
    cipher = Cipher(bytes(range(32)), random_bytes=bytes)
    assert (cipher.key_id.hex(), cipher.name_secret.hex()) == (KEY_ID_VECTOR, NAME_SECRET_VECTOR)
    clear = golden_block()
    root = root_hash(fingerprint=FINGERPRINT, tenant=DEFAULT_TENANT, secret=cipher.name_secret)
    name = block_hash(
        parent=root, token_ids=clear.header.token_ids, extra=b"image", secret=cipher.name_secret
    )
    header = dataclasses.replace(clear.header, hash=name, parent=root)
    files = Files()
    descriptor = files.create(str(tmp_path / "b"))
    write_block(files, descriptor, prepare_block(HostBlock(header, clear.regions), cipher=cipher))
    files.close(descriptor)
    written = (tmp_path / "b").read_bytes()
    assert name.hex() == ENCRYPTED_NAME_VECTOR
    assert written[-36:].hex() == ENCRYPTED_REGIONS_VECTOR
    assert hashlib.sha256(written).hexdigest() == ENCRYPTED_FILE_VECTOR
    assert unwrap_key(bytes.fromhex(WRAPPED_KEY_VECTOR), master_key=bytes(32)) == bytes(range(32))
