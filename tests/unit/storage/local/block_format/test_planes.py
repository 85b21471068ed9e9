"""Byte planes: bit for bit, smaller where that is possible, and nothing in a file is believed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import zstandard
from icehouse_server.domain.blocks import (
    BlockDamage,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
)
from icehouse_server.storage.api import PlannedBlock
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format import planes
from icehouse_server.storage.local.block_format.block_bytes import BlockBytes
from icehouse_server.storage.local.block_format.block_file import (
    open_block,
    prepare_block,
    read_block,
    verify_block,
    write_block,
)
from icehouse_server.storage.local.block_format.header import DTYPE_BYTES, BlockFile, BlockFileError
from icehouse_server.storage.local.block_format.planes import (
    CHUNK_BYTES,
    RATIO_LIMIT,
    DamagedChunk,
    PlaneDecoder,
    PlaneEncoder,
    table_sizes,
)

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.ciphers import BOTH_WAYS, CIPHER, forge

FILES = Files()
SMALL = {"head_count": 2, "row_width": 32, "window": False}
"""The smallest block that gains: its numbers outweigh the tables of Zstandard."""


def write(block: HostBlock, path, *, cipher=None, has_planes: bool = True) -> BlockFile:
    descriptor = FILES.create(str(path))
    try:
        return write_block(FILES, descriptor, prepare_block(block, cipher=cipher, has_planes=has_planes))
    finally:
        os.close(descriptor)


def load(block: HostBlock, path, *, cipher=None, target=None):
    planned = PlannedBlock(block.header, frozenset(region.kind for region in block.regions))
    with open_block(FILES, str(path), planned, cipher=cipher) as (descriptor, file):
        return read_block(FILES, descriptor, file, planned, target, before_read=lambda: None)


def block_of(*tensors: HostTensor) -> HostBlock:
    """Return a block with these tensors as its kv."""
    return dataclasses.replace(make_block(), regions=(HostRegion(RegionKind.KV, tensors),))


def damage_of(path, *, cipher=None) -> BlockDamage:
    with pytest.raises(BlockFileError) as caught:
        verify_block(FILES, str(path), cipher=cipher)
    return caught.value.damage


def values(dtype: str, count: int, *, seed: int = 0) -> HostTensor:
    """Return numbers of few magnitudes, whatever the dtype."""
    width = DTYPE_BYTES[dtype]
    dice = np.random.default_rng(seed)
    data = dice.integers(0, 256, (count, width), dtype=np.uint8)
    data[:, -1] = dice.integers(60, 64, count)
    return HostTensor(f"{seed}", dtype, (count,), memoryview(data.ravel()))


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, cipher):
    counts = (1000, 0, 3, CHUNK_BYTES // 2 + 5)
    block = block_of(*(values(dtype, count, seed=seed) for seed, count in enumerate(counts)))
    if cipher is not None:
        block = dataclasses.replace(block, header=make_block(cipher=cipher).header)
    written = write(block, tmp_path / "b", cipher=cipher)
    assert written.file_bytes == os.path.getsize(tmp_path / "b") < block.size_bytes
    assert all(region.planes for region in written.regions)
    assert verify_block(FILES, str(tmp_path / "b"), cipher=cipher) == written
    (region,) = load(block, tmp_path / "b", cipher=cipher).regions
    assert [tensor.data.tobytes() for tensor in region.tensors] == [
        tensor.data.tobytes() for tensor in block.regions[0].tensors
    ]


def test_numbers_of_different_widths_in_one_region(tmp_path):
    dtypes = ("BF16", "F32", "F32", "U8", "BF16", "U64")
    block = block_of(*(values(dtype, 70_000, seed=seed) for seed, dtype in enumerate(dtypes)))
    write(block, tmp_path / "b")
    (region,) = load(block, tmp_path / "b").regions
    for read, original in zip(region.tensors, block.regions[0].tensors, strict=True):
        assert (read.dtype, read.data.tobytes()) == (original.dtype, original.data.tobytes())


def test_bfloat16_takes_two_thirds(tmp_path):
    block = make_block(head_count=8, row_width=512, window=False, has_values=True)
    kv = block.regions[0].tensors[:2]
    written = write(block_of(*kv), tmp_path / "b")
    assert written.regions[0].stored_bytes <= 0.68 * written.regions[0].size_bytes


@pytest.mark.parametrize("level", [-1, 1, 19])
def test_frames_of_other_levels_are_read(tmp_path, monkeypatch, level):
    """Earlier versions wrote level 1."""
    monkeypatch.setattr(planes, "_PARAMETERS", zstandard.ZstdCompressionParameters.from_level(level))
    block = block_of(values("BF16", 300_000))
    assert write(block, tmp_path / "b").regions[0].planes
    (region,) = load(block, tmp_path / "b").regions
    assert region.tensors[0].data.tobytes() == block.regions[0].tensors[0].data.tobytes()


def test_what_gains_nothing_is_stored_as_it_is(tmp_path):
    """And the file is the raw one, to the bit."""
    block = make_block(head_count=8, row_width=64)
    written = write(block, tmp_path / "planes")
    write(block, tmp_path / "raw", has_planes=False)
    assert not any(region.planes for region in written.regions)
    assert (tmp_path / "planes").read_bytes() == (tmp_path / "raw").read_bytes()


def test_each_region_is_judged_by_itself(tmp_path):
    noise = make_block(head_count=2, row_width=64).regions[1]
    block = dataclasses.replace(
        make_block(), regions=(HostRegion(RegionKind.KV, (values("F32", 9000),)), noise)
    )
    file = write(block, tmp_path / "b")
    assert [region.planes is not None for region in file.regions] == [True, False]
    regions = load(block, tmp_path / "b").regions
    assert [region.size_bytes for region in regions] == [region.size_bytes for region in block.regions]
    assert regions[1].tensors[0].data.tobytes() == noise.tensors[0].data.tobytes()


def test_the_safetensors_library_reads_it(tmp_path):
    block = make_block(has_values=True, **SMALL)
    file = write(block, tmp_path / "b.safetensors")
    content = dict(safetensors.deserialize((tmp_path / "b.safetensors").read_bytes()))
    assert {name: len(facts["data"]) for name, facts in content.items()} == {
        "kv": file.regions[0].stored_bytes
    }


class _Pieces:
    """A target in pieces of odd sizes, as pages are."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = bytearray(size_bytes)

    def segments(self, tensors, *, start_token_index, token_count):
        whole, begin, step, found = memoryview(self.memory), 0, 1, []
        while begin < len(whole):
            found.append(whole[begin : begin + step])
            begin, step = begin + step, step * 3
        return found


def test_kv_goes_straight_into_the_callers_memory(tmp_path):
    block = block_of(values("BF16", 300_000), values("F32", 90_000, seed=1))
    write(block, tmp_path / "b")
    target = _Pieces(block.size_bytes)
    assert load(block, tmp_path / "b", target=target).regions == ()
    assert bytes(target.memory) == b"".join(tensor.data for tensor in block.regions[0].tensors)


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
def test_every_flipped_bit_is_seen(tmp_path, cipher):
    block = make_block(cipher=cipher, token_ids=(1, 2, 3), has_values=True, **SMALL)
    assert any(region.planes for region in write(block, tmp_path / "whole", cipher=cipher).regions)
    text = bytearray((tmp_path / "whole").read_bytes())
    path = tmp_path / "flipped"
    for position in range(len(text)):
        text[position] ^= 1 << (position % 8)
        path.write_bytes(text)
        damage_of(path, cipher=cipher)
        text[position] ^= 1 << (position % 8)


def test_the_checksum_is_of_the_tensors(tmp_path):
    """Bytes of the file that are as they were written are not believed if they decode to something else."""
    block = make_block(has_values=True, **SMALL)
    write(block, tmp_path / "b")

    def lie(facts: dict) -> None:
        regions = json.loads(facts["regions"])
        regions[0]["tensors_xxh3"] = f"{int(regions[0]['tensors_xxh3'], 16) ^ 1:016x}"
        facts["regions"] = json.dumps(regions)

    forge(tmp_path / "b", metadata=lie)
    assert damage_of(tmp_path / "b") is BlockDamage.CHECKSUM


@pytest.mark.parametrize("key", ["stored_bytes", "size_bytes", "tensors_xxh3"])
@pytest.mark.parametrize("value", [None, -1, 0, 1, 1 << 50, "ff", "", [], {}], ids=str)
def test_lies_about_planes_are_damage(tmp_path, key, value):
    block = make_block(has_values=True, **SMALL)
    write(block, tmp_path / "b")

    def lie(facts: dict) -> None:
        regions = json.loads(facts["regions"])
        if value is None:
            del regions[0][key]
        else:
            regions[0][key] = value
        facts["regions"] = json.dumps(regions)

    forge(tmp_path / "b", metadata=lie)
    assert damage_of(tmp_path / "b") in (BlockDamage.HEADER, BlockDamage.TRUNCATED, BlockDamage.CHECKSUM)


def test_planes_without_their_tensors_are_damage(tmp_path):
    write(make_block(has_values=True, **SMALL), tmp_path / "b")
    forge(tmp_path / "b", metadata=lambda facts: facts.pop("tensors"))
    assert damage_of(tmp_path / "b") is BlockDamage.HEADER


def test_a_file_cannot_ask_for_much_more_memory_than_it_has_bytes(tmp_path):
    """A header with all sizes consistent and all checksums right, but a terabyte of tensors."""
    block = make_block(has_values=True, **SMALL)
    file = write(block, tmp_path / "b")
    size_bytes = 1 << 40

    def lie(facts: dict) -> None:
        regions = json.loads(facts["regions"])
        regions[0]["size_bytes"] = size_bytes
        facts["regions"] = json.dumps(regions)
        shape, offsets = [size_bytes // (1 << 20), 1 << 20], [0, size_bytes]
        facts["tensors"] = json.dumps({"kv.a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}})

    forge(tmp_path / "b", metadata=lie)
    with pytest.raises(BlockFileError, match="cannot be so much") as caught:
        verify_block(FILES, str(tmp_path / "b"))
    assert caught.value.damage is BlockDamage.HEADER
    assert file.regions[0].size_bytes <= RATIO_LIMIT * file.regions[0].stored_bytes


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_no_chunk_shrinks_below_the_limit(width):
    parts = PlaneEncoder().encode(np.zeros(CHUNK_BYTES, np.uint8), width=width)
    assert sum(part.nbytes for part in parts) * RATIO_LIMIT >= CHUNK_BYTES


def decode(planes: list[bytes], *, plane_bytes: int) -> None:
    target = np.zeros(plane_bytes * len(planes), np.uint8)
    sizes = [len(plane) for plane in planes]
    PlaneDecoder().decode(sizes, memoryview(b"".join(planes)), target, width=len(planes))


def bomb(plane_bytes: int, **how) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(bytes(plane_bytes))


@pytest.mark.parametrize(
    "plane",
    [
        bomb(1 << 30),
        bomb(1001),
        bomb(999),
        bomb(1000, write_content_size=False),
        bomb(1000)[:-1],
        bomb(1000) + b"\0",
        bomb(1000) + bomb(1000),
        b"\0" * 20,
        b"\x28\xb5\x2f\xfd",
    ],
    ids=["gigabyte", "longer", "shorter", "unsized", "cut", "tail", "twice", "zeros", "magic"],
)
def test_frames_that_are_not_exactly_a_plane_are_refused(plane):
    with pytest.raises(DamagedChunk):
        decode([plane], plane_bytes=1000)


@pytest.mark.parametrize("sizes", [(0, 10), (10, 11), (10, 2**32 - 1)])
def test_tables_that_no_chunk_has_are_refused(sizes):
    table = b"".join(size.to_bytes(4, "little") for size in sizes)
    with pytest.raises(DamagedChunk):
        table_sizes(table, plane_bytes=10)


def test_without_the_key_the_stored_bytes_are_checked(tmp_path: Path):
    block = make_block(cipher=CIPHER, has_values=True, **SMALL)
    written = write(block, tmp_path / "b", cipher=CIPHER)
    known = verify_block(FILES, str(tmp_path / "b"))
    assert known.header is None and known.region_bytes(RegionKind.KV) == block.size_bytes
    assert written.regions[0].planes is not None and written.regions[0].planes.checksum is not None
    assert f"{written.regions[0].planes.checksum:016x}".encode() not in (tmp_path / "b").read_bytes()
    text = bytearray((tmp_path / "b").read_bytes())
    text[-1] ^= 1
    (tmp_path / "b").write_bytes(text)
    assert damage_of(tmp_path / "b") is BlockDamage.CHECKSUM


def test_an_archive_with_planes_is_read_over_the_wire_too(tmp_path):
    block = make_block(has_values=True, **SMALL)
    assert write(block, tmp_path / "planes").regions[0].planes is not None
    data = bytearray((tmp_path / "planes").read_bytes())
    read = BlockBytes().decode(memoryview(bytes(data)))
    assert [bytes(t.data) for r in read.regions for t in r.tensors] == [
        bytes(t.data) for r in block.regions for t in r.tensors
    ]
    data[-1] ^= 1
    with pytest.raises(ValueError, match="region"):
        BlockBytes().decode(memoryview(bytes(data)))
