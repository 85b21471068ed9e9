"""The block file: bit for bit, readable by the safetensors library, and never believed."""

from __future__ import annotations

import json
import os
import tempfile

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.blocks import (
    BlockDamage,
    BlockHeader,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
    block_hash,
)
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import (
    prepare_block,
    read_head,
    verify_block,
    write_block,
)
from icehouse_server.storage.local.block_format.header import (
    DTYPE_BYTES,
    BlockFile,
    BlockFileError,
    parse_head,
)
from icehouse_server.storage.local.encryption.aes_gcm import Cipher

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.ciphers import BOTH_WAYS

FILES = Files()


def write(block: HostBlock, path, *, cipher: Cipher | None = None) -> BlockFile:
    descriptor = FILES.create(str(path))
    try:
        return write_block(FILES, descriptor, prepare_block(block, cipher=cipher))
    finally:
        os.close(descriptor)


def head_of(path, *, cipher: Cipher | None = None) -> BlockFile:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_head(FILES, descriptor, cipher=cipher)
    finally:
        os.close(descriptor)


@st.composite
def blocks(draw, *, secret: bytes = b"") -> HostBlock:
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=0, max_size=6, unique=True))
    kinds = sorted(
        draw(st.sets(st.sampled_from(list(RegionKind)))), key=lambda kind: list(RegionKind).index(kind)
    )
    regions = []
    for kind in kinds:
        tensors = []
        for name in names:
            dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
            size_bytes = int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]
            data = draw(st.binary(min_size=size_bytes, max_size=size_bytes))
            tensors.append(HostTensor(name, dtype, shape, memoryview(data)))
        regions.append(HostRegion(kind, tuple(tensors)))
    token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12)))
    parent = BlockHash(draw(st.binary(min_size=32, max_size=32)))
    extra = draw(st.binary(max_size=40))
    header = BlockHeader(
        hash=block_hash(parent=parent, token_ids=token_ids, extra=extra, secret=secret),
        parent=parent,
        fingerprint=Fingerprint(draw(st.binary(min_size=32, max_size=32))),
        start_token_index=draw(st.integers(0, 2**40)),
        token_ids=token_ids,
        block_token_limit=draw(st.integers(len(token_ids), 1024)),
        extra=extra,
    )
    return HostBlock(header, tuple(regions))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("cipher", **BOTH_WAYS)
def test_round_trip(tmp_path_factory, data, cipher):
    block = data.draw(blocks(secret=cipher.name_secret if cipher else b""))
    path = tmp_path_factory.mktemp("block") / "b.safetensors"
    written = write(block, path, cipher=cipher)
    assert head_of(path, cipher=cipher) == written == verify_block(FILES, str(path), cipher=cipher)
    assert written.header == block.header and written.file_bytes == os.path.getsize(path)
    text = bytearray(path.read_bytes())
    for region, original in zip(written.regions, block.regions, strict=True):
        assert region.kind is original.kind
        if written.cipher is not None:
            decryptor = written.cipher.decryptor(region.kind, tag=region.tag)
            decryptor.update(memoryview(text)[region.offset : region.offset + region.size_bytes])
            assert decryptor.finish()
        offset = region.offset
        for tensor, source in zip(region.tensors, original.tensors, strict=True):
            assert (tensor.name, tensor.dtype, tensor.shape) == (source.name, source.dtype, source.shape)
            assert text[offset : offset + tensor.size_bytes] == source.data
            offset += tensor.size_bytes


def test_the_safetensors_library_reads_it(tmp_path):
    block = make_block(checkpoint=True)
    write(block, tmp_path / "b.safetensors")
    with safetensors.safe_open(tmp_path / "b.safetensors", framework="np") as opened:
        assert opened.metadata()["format"] == "icehouse.block"
        assert opened.metadata()["hash"] == block.header.hash.hex()
    content = safetensors.deserialize((tmp_path / "b.safetensors").read_bytes())
    found = {name: (facts["dtype"], tuple(facts["shape"]), bytes(facts["data"])) for name, facts in content}
    assert found == {
        f"{region.kind}.{tensor.name}": (tensor.dtype, tensor.shape, bytes(tensor.data))
        for region in block.regions
        for tensor in region.tensors
    }


def test_regions_are_contiguous_and_in_order(tmp_path):
    file = write(make_block(checkpoint=True), tmp_path / "b")
    assert [region.kind for region in file.regions] == list(RegionKind)
    for before, after in zip(file.regions, file.regions[1:], strict=False):
        assert before.offset + before.size_bytes == after.offset
    assert file.regions[-1].offset + file.regions[-1].size_bytes == file.file_bytes
    assert file.regions[0].offset % 8 == 0


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
def test_every_flipped_bit_of_a_small_file_is_seen(tmp_path, cipher):
    block = make_block(head_count=1, row_width=1, window=False, token_ids=(1, 2, 3), cipher=cipher)
    write(block, tmp_path / "whole", cipher=cipher)
    text = bytearray((tmp_path / "whole").read_bytes())
    path = tmp_path / "flipped"
    for position in range(len(text)):
        text[position] ^= 1 << (position % 8)
        path.write_bytes(text)
        with pytest.raises(BlockFileError):
            verify_block(FILES, str(path), cipher=cipher)
        text[position] ^= 1 << (position % 8)


def test_every_truncation_and_growth_is_seen(tmp_path):
    write(make_block(head_count=1, row_width=1), tmp_path / "whole")
    text = (tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for size_bytes in (*range(0, len(text), 7), len(text) - 1):
        path.write_bytes(text[:size_bytes])
        with pytest.raises(BlockFileError) as caught:
            verify_block(FILES, str(path))
        assert caught.value.damage in (BlockDamage.TRUNCATED, BlockDamage.HEADER)
    path.write_bytes(text + b"\0")
    with pytest.raises(BlockFileError):
        verify_block(FILES, str(path))


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=200), claim=st.integers(0, 2**64 - 1), size=st.integers(0, 2**40))
def test_junk_is_refused_and_nothing_else_happens(junk, claim, size):
    for head in (junk, claim.to_bytes(8, "little") + junk):
        with pytest.raises(BlockFileError):
            parse_head(head, file_bytes=size)


LIES = {
    "overlap": lambda meta, entries: entries["kv.000.v"].update(
        data_offsets=entries["kv.000.k"]["data_offsets"]
    ),
    "negative": lambda meta, entries: entries["kv.000.k"].update(data_offsets=[-8, 504]),
    "huge": lambda meta, entries: entries["kv.003.k"].update(shape=[2**40, 2**40]),
    "float": lambda meta, entries: entries["kv.000.k"].update(shape=[1.0, 2, 16, 8]),
    "bool": lambda meta, entries: entries["kv.000.k"].update(shape=[True, 2, 16, 8]),
    "dtype": lambda meta, entries: entries["kv.000.k"].update(dtype="F99"),
    "dtype of no cache": lambda meta, entries: entries["kv.000.k"].update(
        dtype="F8_E4M3", shape=[1, 2, 16, 16]
    ),
    "endless and empty": lambda meta, entries: entries.update(
        {"kv.999": {"dtype": "U8", "shape": [0, 2**31], "data_offsets": 2 * [kv_end(entries)]}}
    ),
    "no offsets": lambda meta, entries: entries["kv.000.k"].pop("data_offsets"),
    "unknown region": lambda meta, entries: entries.update({"other.x": entries.pop("kv.003.k")}),
    "not a tensor": lambda meta, entries: entries.update({"kv.000.k": 7}),
    "no hash": lambda meta, entries: meta.pop("hash"),
    "other hash": lambda meta, entries: meta.update(hash="00" * 32),
    "short parent": lambda meta, entries: meta.update(parent="00"),
    "other format": lambda meta, entries: meta.update(format="pt"),
    "no tokens": lambda meta, entries: meta.update(token_ids=""),
    "region gap": lambda meta, entries: meta.update(
        regions=meta["regions"].replace('"offset":0', '"offset":8')
    ),
    "regions gone": lambda meta, entries: meta.update(regions="[]"),
    "regions deep": lambda meta, entries: meta.update(regions="[" * 100_000),
    "list": lambda meta, entries: meta.update(regions={"a": 1}),
}


def kv_end(entries: dict) -> int:
    return max(facts["data_offsets"][1] for name, facts in entries.items() if name.startswith("kv."))


@pytest.mark.parametrize("name", LIES)
def test_a_lie_with_a_right_checksum_is_refused(name):
    with pytest.raises(BlockFileError) as caught:
        parse_lie(LIES[name])
    assert caught.value.damage in (BlockDamage.HEADER, BlockDamage.TRUNCATED)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_lie_with_a_right_checksum_breaks_the_parser(data):
    def lie(meta: dict, entries: dict) -> None:
        holder = data.draw(st.sampled_from([meta, entries, *entries.values()]))
        key = data.draw(st.sampled_from(sorted(holder)) | st.text(max_size=9))
        holder[key] = data.draw(JSON)

    try:
        parse_lie(lie)
    except BlockFileError as error:
        assert error.damage in (BlockDamage.HEADER, BlockDamage.TRUNCATED, BlockDamage.OTHER_ABI)


def test_another_abi_is_not_called_damage():
    with pytest.raises(BlockFileError) as caught:
        parse_lie(lambda meta, entries: meta.update(layout_abi="3", regions="unreadable"))
    assert caught.value.damage is BlockDamage.OTHER_ABI


def parse_lie(lie) -> BlockFile:
    head, file_bytes = resign(lie)
    return parse_head(head, file_bytes=file_bytes)


def test_a_resigned_truth_is_believed():
    assert parse_lie(lambda meta, entries: None).header == make_block().header


def resign(lie) -> tuple[bytes, int]:
    """Return a head with one lie in it and a checksum that fits."""
    head, file_bytes = described(make_block())
    content = json.loads(head[8:])
    meta = content.pop("__metadata__")
    lie(meta, content)
    meta["header_xxh3"] = "0" * 16
    body = json.dumps({"__metadata__": meta, **content}, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    new = len(body).to_bytes(8, "little") + body
    at = new.index(b"0" * 16)
    encrypted = new[:at] + b"%016x" % xxhash.xxh3_64_intdigest(new) + new[at + 16 :]
    return encrypted, file_bytes - len(head) + len(encrypted)


def described(block: HostBlock) -> tuple[bytes, int]:
    """Return a true head and the bytes of its file."""
    prepared = prepare_block(block)
    with tempfile.TemporaryDirectory() as folder:
        write(block, f"{folder}/b")
        with open(f"{folder}/b", "rb") as file:
            return file.read(prepared.head_bytes), prepared.file_bytes
