"""The tier with blocks in byte planes: smaller files, the same bytes, and neighbours that are stored raw."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import BlockDamage, HostBlock
from icehouse_server.storage.api import BlockPersisted, BlocksLoaded, StorageFailure
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.storage_settings import Codec

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.ciphers import BOTH_WAYS
from tests.fixtures.storage.faults import CrashingFiles
from tests.fixtures.storage.loading import BlockBuffers, assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread, drops
from tests.unit.storage.local.test_crash import check_is_clean, run_until_crash


def chain_of(count: int = 3, *, cipher: Cipher | None = None, **how) -> list[HostBlock]:
    return make_chain(count, row_width=64, checkpoint=True, cipher=cipher, has_values=True, **how)


def gains(served: StorageThread) -> list[bool]:
    """Return which files have fewer bytes than their tensors."""
    index = served.storage._store.index
    return [r.file_bytes < r.kv_bytes + r.window_bytes + r.checkpoint_bytes for r in index]


def load(served: StorageThread, chain: list[HostBlock]) -> BlocksLoaded:
    served.take()
    served.storage.get_into(*plan(chain))
    (loaded,) = [outcome for outcome in served.take() if isinstance(outcome, BlocksLoaded)]
    return loaded


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
def test_smaller_on_disk_and_the_same_after_a_restart(tmp_path: Path, cipher: Cipher | None) -> None:
    chain = chain_of(cipher=cipher)
    raw_bytes = sum(block.size_bytes for block in chain)
    with StorageThread(tmp_path, codec=Codec.PLANES, cipher=cipher) as served:
        served.spill(*chain)
        disk = served.stats().disk
        written = sum(os.path.getsize(served.path(block)) for block in chain)
    assert (disk.block_bytes, disk.raw_block_bytes, disk.is_compressing) == (written, raw_bytes, True)
    assert disk.block_bytes < disk.raw_block_bytes
    check_is_clean(tmp_path)
    with StorageThread(tmp_path, cipher=cipher) as served:
        records = served.take_inventory()
        assert gains(served) == [True] * 3
        assert [record.kv_bytes for record in records] == [block.regions[0].size_bytes for block in chain]
        loaded = load(served, chain)
        assert_holds(loaded, chain)
        assert loaded.read_bytes == raw_bytes
        served.storage.verify()
        served.settle()
        stats = served.stats()
        assert stats.integrity.damaged_block_total == 0 and stats.integrity.verified_block_total == 6
        assert (stats.disk.block_bytes, stats.disk.is_compressing) == (written, False)


@pytest.mark.parametrize("codecs", [(Codec.RAW, Codec.PLANES), (Codec.PLANES, Codec.RAW)])
def test_raw_blocks_and_planes_lie_side_by_side(tmp_path: Path, codecs: tuple[Codec, Codec]) -> None:
    chain = chain_of(4)
    for codec, blocks in zip(codecs, (chain[:2], chain[2:]), strict=True):
        with StorageThread(tmp_path, codec=codec) as served:
            served.spill(*blocks)
    with StorageThread(tmp_path, codec=codecs[0]) as served:
        assert_holds(load(served, chain), chain)
        assert sorted(gains(served)) == [False] * 2 + [True] * 2
        # In memory of the caller's, as pages are.
        planned, _ = plan(chain)
        target = BlockBuffers(planned)
        served.storage.get_into(planned, target)
        (loaded,) = served.take()
        assert loaded.failure is None
    assert [[tensor.data for tensor in region.tensors] for region in target.regions()] == [
        [tensor.data for tensor in block.regions[0].tensors] for block in chain
    ]


def test_a_flipped_bit_is_a_miss_and_the_blocks_before_it_are_used(tmp_path: Path) -> None:
    chain = chain_of()
    with StorageThread(tmp_path, codec=Codec.PLANES) as served:
        served.spill(*chain)
        path = Path(served.path(chain[1]))
        text = bytearray(path.read_bytes())
        text[len(text) // 2] ^= 1
        path.write_bytes(text)
        loaded = load(served, chain)
        assert_holds(loaded, chain[:1])
        assert loaded.failure is not None and loaded.failure.cause is BlockDamage.CHECKSUM
        integrity = served.stats().integrity
        assert (integrity.checksum_failure_total, integrity.quarantined_block_total) == (1, 1)


def test_the_size_limit_holds_and_more_blocks_fit_below_it(tmp_path: Path) -> None:
    chain = [make_block(seed=seed, row_width=512, window=False, has_values=True) for seed in range(40)]
    counts = {}
    for codec in (Codec.RAW, Codec.PLANES):
        limit_bytes = LOG_ALLOWANCE_BYTES + 1_500_000
        with StorageThread(tmp_path / codec, codec=codec, limit_bytes=limit_bytes) as served:
            for block in chain:
                served.spill(block)
                assert served.storage._store.used_bytes() <= limit_bytes
            stats = served.stats()
            assert not drops(served.outcomes) and stats.ssd.evicted_block_total > 0
            counts[codec] = stats.ssd.block_count
    assert counts[Codec.PLANES] > 1.2 * counts[Codec.RAW]


def test_the_bytes_of_files_count_as_written(tmp_path: Path) -> None:
    with StorageThread(tmp_path, codec=Codec.PLANES) as served:
        served.spill(*chain_of())
        spill = served.stats().spill
        file_bytes = sum(record.file_bytes for record in served.storage._store.index)
    assert spill.written_today_bytes == spill.persisted_byte_total == file_bytes


def test_crash_after_every_step_of_a_spill(tmp_path: Path) -> None:
    committed, more = chain_of(2), chain_of(2, seed=2)
    crash_at = 0
    has_crashed = True
    while has_crashed:
        crash_at += 1
        assert crash_at < 100
        directory = tmp_path / str(crash_at)
        with StorageThread(directory, codec=Codec.PLANES) as served:
            served.spill(*committed)
        files = CrashingFiles(crash_at)
        dead = StorageThread(directory, files=files, codec=Codec.PLANES)

        def spill(served: StorageThread) -> None:
            served.files.is_armed = True
            served.spill(*more)

        has_crashed = run_until_crash(dead, spill)
        persisted = {o.record.hash for o in dead.outcomes if isinstance(o, BlockPersisted)}
        with StorageThread(directory, codec=Codec.PLANES) as served:
            check_is_clean(directory)
            known = {record.hash for record in served.take_inventory()}
            assert {block.header.hash for block in committed} | persisted <= known
            for block in (*committed, *more):
                if block.header.hash in known:
                    assert_holds(load(served, [block]), [block])
            assert served.stats().integrity.quarantined_block_total == 0
    assert crash_at > 5


class _TickingClock(ManualClock):
    """A clock that moves with every look."""

    def monotonic(self) -> float:
        self.advance(0.001)
        return self.now_s


def test_the_rate_of_decompression_is_measured(tmp_path: Path) -> None:
    chain = chain_of()
    with StorageThread(tmp_path, codec=Codec.PLANES, clock=_TickingClock()) as served:
        served.spill(*chain)
        before = served.stats().disk.decompress_bytes_per_s
        assert not any(isinstance(outcome, StorageFailure) for outcome in served.take())
        load(served, chain)
        after = served.stats().disk.decompress_bytes_per_s
    assert before == 0.0 < after
