"""Files spoiled under a running server: the text stays the same, the damage is told and put aside."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Verify, VerifyReport
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.engine.prefix_cache.tiers import write_behind

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.storage.faults import FaultyFiles
from tests.fixtures.storage.storage_thread import ManualClock
from tests.system.cache.damage import DAMAGES, block_files, flip, tensor_offset
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

TOKENS = prompt(4 * BLOCK + 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(parent, name) for name in ("llama", "gemma3_text", "falcon_h1")}


@pytest.fixture(scope="module")
def filled(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[int]]]:
    """A directory of blocks per model and what the model says to `TOKENS`."""
    made = {}
    for name, folder in models.items():
        directory = tmp_path_factory.mktemp(name)
        with CacheServer(folder, directory) as served:
            made[name] = (directory, served.ask("cold", TOKENS).tokens)
    return made


@pytest.mark.parametrize("earlier", DAMAGES)
def test_what_is_damaged_can_be_damaged_again(filled, tmp_path: Path, earlier: str) -> None:
    """Histories spoil files while the server is yet to find what was spoiled in the life before."""
    source, _ = filled["llama"]
    for number, damage in enumerate(DAMAGES):
        directory = Path(shutil.copytree(source, tmp_path / str(number)))
        before = len(block_files(directory))
        for name in (earlier, damage):
            DAMAGES[name](block_files(directory))
        assert len(block_files(directory)) <= before, damage


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_a_miss(models, filled, tmp_path: Path, damage: str) -> None:
    source, cold = filled["gemma3_text"]
    directory = shutil.copytree(source, tmp_path / "copy")
    with CacheServer(models["gemma3_text"], directory) as served:
        DAMAGES[damage](block_files(directory))
        first = served.ask("first", TOKENS)
        second = served.ask("second", TOKENS)
        _, stats = served.stats()
    assert first.tokens == cold and second.tokens == cold
    assert first.cache.limit in (ReuseLimit.LOAD_FAILED, ReuseLimit.DIVERGED)
    assert first.cache.cached_token_count < len(TOKENS) - 1
    assert second.cache.ram_token_count == len(TOKENS) - 1
    integrity = stats.integrity
    found = integrity.checksum_failure_total + integrity.header_mismatch_total + integrity.missing_file_total
    assert found >= stats.promote.failed_load_total > 0
    if damage != "deleted":
        assert integrity.quarantined_file_count > 0


@pytest.mark.parametrize("tensor", [0, -1], ids=["kv", "checkpoint"])
def test_one_bit_in_a_region_of_a_hybrid(models, filled, tmp_path: Path, tensor: int) -> None:
    source, cold = filled["falcon_h1"]
    directory = shutil.copytree(source, tmp_path / "copy")
    with CacheServer(models["falcon_h1"], directory) as served:
        for path in block_files(directory):
            flip(path, tensor_offset(path, tensor))
        assert served.ask("first", TOKENS).tokens == cold
        _, stats = served.stats()
        assert stats.integrity.checksum_failure_total > 0
        assert stats.integrity.quarantined_file_count == stats.integrity.checksum_failure_total


def test_damage_in_one_block_leaves_what_is_before_it(models, filled, tmp_path: Path) -> None:
    source, cold = filled["llama"]
    directory = shutil.copytree(source, tmp_path / "copy")
    with CacheServer(models["llama"], directory) as served:
        chain = sorted(served.cache.tree, key=lambda entry: entry.start_token_index)
        (third,) = [path for path in block_files(directory) if path.stem == chain[2].hash.hex()]
        flip(third, tensor_offset(third, 1))
        answer = served.ask("first", TOKENS)
    assert answer.tokens == cold
    assert answer.cache.ssd_token_count == 2 * BLOCK and answer.cache.limit is ReuseLimit.LOAD_FAILED
    with CacheServer(models["llama"], directory) as served:
        assert served.ask("after a restart", TOKENS).cache.ssd_token_count >= 4 * BLOCK


def test_the_directory_is_deleted_under_the_server(models, filled, tmp_path: Path) -> None:
    source, cold = filled["llama"]
    directory = shutil.copytree(source, tmp_path / "copy")
    with CacheServer(models["llama"], directory) as served:
        shutil.rmtree(directory)
        assert served.ask("first", TOKENS).tokens == cold
        assert served.ask("second", TOKENS).cache.ram_token_count == len(TOKENS) - 1


@pytest.mark.parametrize("verb", ["make_dir", "lock", "list", "stat"])
def test_a_directory_that_cannot_be_opened_still_serves(models, filled, tmp_path: Path, verb: str) -> None:
    source, cold = filled["llama"]
    directory = shutil.copytree(source, tmp_path / "copy")
    files = FaultyFiles(verb, 1, errno.EROFS, times=1000)
    files.is_armed = True
    with CacheServer(models["llama"], directory, files=files) as served:
        assert served.ask("first", TOKENS).tokens == cold
        assert served.ask("second", TOKENS).cache.ram_token_count == len(TOKENS) - 1
        _, stats = served.stats()
        assert stats.disk is not None and stats.disk.writes_off_detail
        assert stats.spill.persisted_block_total == 0
    assert len(block_files(directory)) == len(block_files(source)), "nothing was touched"


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["create", "write", "fsync", "rename"])
def test_a_disk_that_takes_nothing(
    models, filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, error_number: int
) -> None:
    _, cold = filled["llama"]
    # What still waits is tried at once. How long it waits is what the tests of write-behind tell.
    monkeypatch.setattr(write_behind, "FAILURE_PAUSE_S", 0.0)
    files = FaultyFiles(verb, 1, error_number, times=1000)
    with CacheServer(
        models["llama"],
        tmp_path / "blocks",
        files=files,
        spill_policy="write_behind",
        # A second later the disk is tried again, and taken for whole until the next write.
        storage_clock=ManualClock(),
    ) as served:
        files.is_armed = True
        answers = [served.ask(f"turn {turn}", TOKENS) for turn in range(3)]
        stats = served.settle()
        assert all(answer.tokens == cold for answer in answers)
        assert answers[-1].cache.ram_token_count == len(TOKENS) - 1
        assert stats.spill.accepted_block_total > 0 == stats.spill.persisted_block_total
        assert sum(drop.block_total for drop in stats.spill.drops) == stats.spill.accepted_block_total
        assert stats.disk is not None and stats.disk.writes_off_detail
        files.is_armed = False


def test_verify_under_load(models, filled, tmp_path: Path) -> None:
    source, cold = filled["llama"]
    directory = shutil.copytree(source, tmp_path / "copy")
    with CacheServer(models["llama"], directory) as served:
        count = len(block_files(directory))
        served.submit("beside", TOKENS)
        report = served.order(Verify())
        assert isinstance(report, VerifyReport)
        assert report.verified_block_count == count and report.damaged_hashes == ()
        assert served.answer("beside").tokens == cold
