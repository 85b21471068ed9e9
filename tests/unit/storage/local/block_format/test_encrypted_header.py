"""An encrypted block file: a safetensors file still, and one that nobody reads or changes without the key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors
import xxhash
from icehouse_server.domain.blocks import (
    BlockDamage,
    HostBlock,
    RegionKind,
    pack_tokens,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import prepare_block, verify_block, write_block
from icehouse_server.storage.local.block_format.header import (
    BlockFile,
    BlockFileError,
    BlockOutline,
    encode_head,
    file_cipher_of,
)
from icehouse_server.storage.local.encryption.aes_gcm import Cipher

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.ciphers import CIPHER, OTHER_CIPHER, forge
from tests.unit.storage.local.block_format.test_block_file import head_of, write

FILES = Files()
BLOCK = make_block(checkpoint=True, cipher=CIPHER)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(BLOCK, tmp_path / "block", cipher=CIPHER)
    return tmp_path / "block"


def damage_of(path: Path, cipher: Cipher | None = CIPHER) -> BlockDamage:
    with pytest.raises(BlockFileError) as caught:
        verify_block(FILES, str(path), cipher=cipher)
    return caught.value.damage


def secrets_of(block: HostBlock) -> list[bytes]:
    """Return what of a block must be nowhere on a disk."""
    tokens = pack_tokens(block.header.token_ids)
    data = [bytes(tensor.data[:16]) for region in block.regions for tensor in region.tensors]
    return [tokens[:16], tokens[:16].hex().encode(), b"000.k", *data]


def test_in_the_clear_everything_is_there(tmp_path: Path) -> None:
    block = make_block(checkpoint=True)
    write(block, tmp_path / "clear")
    text = (tmp_path / "clear").read_bytes()
    packed, hexed, *rest = secrets_of(block)
    assert all(secret in text for secret in (hexed, *rest)) and packed not in text
    assert b"icehouse.block.sealed" not in text


def test_nothing_of_a_prompt_can_be_read(path: Path) -> None:
    text = path.read_bytes()
    assert b"icehouse.block.sealed" in text
    assert not [secret for secret in secrets_of(BLOCK) if secret in text]


def test_the_safetensors_library_reads_it_as_one_tensor_per_region(path: Path) -> None:
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata()["format"] == "icehouse.block.sealed"
        assert set(opened.keys()) == {"kv", "window", "checkpoint"}


def test_one_block_never_gives_the_same_bytes_twice(path: Path, tmp_path: Path) -> None:
    again = write(BLOCK, tmp_path / "again", cipher=CIPHER)
    first, second = path.read_bytes(), (tmp_path / "again").read_bytes()
    assert len(first) == len(second)
    for region in again.regions:
        assert (
            first[region.offset : region.offset + region.size_bytes]
            != second[region.offset : region.offset + region.size_bytes]
        )


def test_regions_of_equal_bytes_are_not_equal_on_disk(tmp_path: Path) -> None:
    """The nonces of one file differ: the same nonce twice would show what two regions differ in."""
    zeros = [CIPHER.file(salt=bytes(32), facts=b"").encryptor(kind) for kind in RegionKind]
    seen = set()
    for encryptor in zeros:
        room = memoryview(bytearray(64))
        encryptor.update(memoryview(bytes(64)), room)
        seen.add(bytes(room))
    assert len(seen) == 3


def test_without_the_key_only_the_outline_is_seen(path: Path) -> None:
    for cipher in (None, OTHER_CIPHER):
        file = verify_block(FILES, str(path), cipher=cipher)
        assert file.header is None and file.cipher is None
        assert file.outline == BlockOutline.of(BLOCK.header)
        assert file.key_id == CIPHER.key_id
        assert [(region.kind, region.size_bytes) for region in file.regions] == [
            (region.kind, region.size_bytes) for region in BLOCK.regions
        ]
        assert not any(region.tensors for region in file.regions)


def test_a_forged_byte_with_a_right_checksum_is_seen(path: Path) -> None:
    regions = head_of(path, cipher=CIPHER).regions
    text = path.read_bytes()
    for region in regions:
        path.write_bytes(text)
        forge(path, flip_at=region.offset - regions[0].offset + region.size_bytes // 2)
        assert damage_of(path) is BlockDamage.AUTH_TAG
        assert verify_block(FILES, str(path), cipher=None).header is None, "its checksums fit"


LIES = {
    "token count": lambda facts: facts.update(token_count="15"),
    "start": lambda facts: facts.update(start_token_index="16"),
    "block size": lambda facts: facts.update(block_token_limit="32"),
    "hash": lambda facts: facts.update(hash="00" * 32),
    "parent": lambda facts: facts.update(parent="00" * 32),
    "fingerprint": lambda facts: facts.update(fingerprint="00" * 32),
    "salt": lambda facts: facts.update(salt="00" * 32),
    "sealed": lambda facts: facts.update(sealed=facts["sealed"][4:]),
    "tag": lambda facts: facts.update(
        regions=json.dumps([{**region, "tag": "00" * 16} for region in json.loads(facts["regions"])])
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_header_with_a_right_checksum_is_seen(path: Path, lie: str) -> None:
    forge(path, metadata=LIES[lie])
    assert damage_of(path) is BlockDamage.AUTH_TAG


def test_a_forger_who_changes_nothing_is_believed(path: Path) -> None:
    forge(path)
    assert verify_block(FILES, str(path), cipher=CIPHER).header == BLOCK.header


CRUDE = {
    "no key": lambda facts: facts.pop("key"),
    "short key": lambda facts: facts.update(key="00"),
    "short tag": lambda facts: facts.update(regions=facts["regions"].replace('"tag":"', '"tag":"00')),
    "gap": lambda facts: facts.update(regions=facts["regions"].replace('"offset":0', '"offset":8')),
    "no base64": lambda facts: facts.update(sealed="*"),
    "negative": lambda facts: facts.update(token_count="-1"),
    "regions gone": lambda facts: facts.update(regions="[]"),
    "deep": lambda facts: facts.update(regions="[" * 100_000),
}


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["no key", "key"])
@pytest.mark.parametrize("lie", CRUDE)
def test_a_header_that_cannot_be_is_refused_by_everybody(path: Path, lie: str, cipher: Cipher | None) -> None:
    forge(path, metadata=CRUDE[lie])
    assert damage_of(path, cipher) in (BlockDamage.HEADER, BlockDamage.TRUNCATED)


def test_another_abi_is_not_called_damage(path: Path) -> None:
    forge(path, metadata=lambda facts: facts.update(layout_abi="3", regions="unreadable"))
    assert damage_of(path) is BlockDamage.OTHER_ABI


def test_a_write_that_is_tried_again_takes_a_new_salt(tmp_path: Path) -> None:
    prepared = prepare_block(BLOCK, cipher=CIPHER)
    files: list[BlockFile] = []
    for name in ("first", "second"):
        descriptor = FILES.create(str(tmp_path / name))
        files.append(write_block(FILES, descriptor, prepared))
        FILES.close(descriptor)
    assert files[0].regions[0].tag != files[1].regions[0].tag
    assert files[0].header == files[1].header


def test_bytes_made_to_fit_the_checksum_fail_by_their_tag(path: Path) -> None:
    """xxh3 is no secret and can be met by design; here its part of the header is even encrypted anew."""
    file = head_of(path, cipher=CIPHER)
    text = bytearray(path.read_bytes())
    region = file.regions[0]
    text[region.offset] ^= 1
    checksum = xxhash.xxh3_64_intdigest(text[region.offset : region.offset + region.size_bytes])
    regions = (dataclasses.replace(region, checksum=checksum), *file.regions[1:])
    assert file.cipher is not None
    head, _ = encode_head(BLOCK.header, regions, file.cipher)
    path.write_bytes(head + text[region.offset :])
    assert damage_of(path) is BlockDamage.AUTH_TAG


def test_every_part_is_bound_to_the_public_facts() -> None:
    outline = BlockOutline.of(BLOCK.header)
    other = dataclasses.replace(outline, start_token_index=outline.start_token_index + 16)
    mine, theirs = (file_cipher_of(CIPHER, item, salt=bytes(32)) for item in (outline, other))
    encrypted = mine.encrypt_header(b"text")
    assert mine.decrypt_header(encrypted) == b"text" and theirs.decrypt_header(encrypted) is None
    room = memoryview(bytearray(8))
    encryptor = mine.encryptor(RegionKind.KV)
    encryptor.update(memoryview(b"8 bytes."), room)
    tag = encryptor.finish()
    for cipher, kind, is_right in (
        (mine, RegionKind.KV, True),
        (theirs, RegionKind.KV, False),
        (mine, RegionKind.WINDOW, False),
    ):
        decryptor = cipher.decryptor(kind, tag=tag)
        copy = memoryview(bytearray(room))
        decryptor.update(copy)
        assert decryptor.finish() is is_right
        assert (bytes(copy) == b"8 bytes.") is (kind is RegionKind.KV)


def test_names_tell_nothing_to_those_who_guess() -> None:
    names = {make_block(cipher=cipher).header.hash for cipher in (None, CIPHER, OTHER_CIPHER)}
    parents = {make_block(cipher=cipher).header.parent for cipher in (None, CIPHER, OTHER_CIPHER)}
    assert len(names) == 3 and len(parents) == 3
