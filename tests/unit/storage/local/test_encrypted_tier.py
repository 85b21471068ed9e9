"""The SSD tier with a key: what lies on the disk, whose blocks are whose, and what tampering comes to."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import IntegrityStats
from icehouse_server.storage.api import BlocksLoaded, StorageFailure
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.data_keys import open_key
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.offline import OfflineStore, PurgeScope
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, encrypted_fingerprint
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import FINGERPRINT, make_block, make_chain
from tests.fixtures.storage.ciphers import CIPHER, OTHER_CIPHER, forge
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.unit.storage.local.block_format.test_encrypted_header import secrets_of
from tests.unit.storage.local.test_crash import check_is_clean


def server_of(directory: Path, cipher: Cipher | None = CIPHER, **how) -> StorageThread:
    """Return a tier as it is composed for a key: filed apart, its key's id among the details."""
    return StorageThread(directory, cipher=cipher, **fingerprint_of(cipher), **how)


def fingerprint_of(cipher: Cipher | None) -> dict:
    if cipher is None:
        return {}
    return {
        "fingerprint": encrypted_fingerprint(FINGERPRINT, cipher.key_id),
        "details": {"architecture": "test", KEY_DETAIL: cipher.key_id.hex()},
    }


def chain_of(cipher: Cipher | None, count: int = 3, **how):
    fingerprint = fingerprint_of(cipher).get("fingerprint", FINGERPRINT)
    return make_chain(count, cipher=cipher, fingerprint=fingerprint, **how)


def whole_directory(directory: Path) -> bytes:
    """Return all bytes of all files, and their names."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return b"\n".join(path.read_bytes() + path.name.encode() for path in files)


def known(served: StorageThread) -> list[bool]:
    names = {record.hash for record in served.take_inventory()}
    return [block.header.hash in names for block in chain_of(CIPHER)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three encrypted blocks, closed."""
    with server_of(tmp_path / "cache") as served:
        served.spill(*chain_of(CIPHER, checkpoint=True))
    return tmp_path / "cache"


def test_spilled_and_loaded_after_a_restart(directory: Path) -> None:
    chain = chain_of(CIPHER, checkpoint=True)
    with server_of(directory) as served:
        assert served.storage.get_into(*plan(chain))
        (loaded,) = [outcome for outcome in served.take() if isinstance(outcome, BlocksLoaded)]
        assert loaded.failure is None
        assert_holds(loaded, chain)
        served.storage.verify()
        served.settle()
        stats = served.stats()
    assert stats.disk.is_encrypted and stats.integrity == IntegrityStats(verified_block_total=6)
    assert stats.last_reconcile.clean


@pytest.mark.parametrize("is_open", [False, True])
def test_nothing_of_a_prompt_is_anywhere(tmp_path: Path, is_open: bool) -> None:
    for cipher, expected in ((CIPHER, False), (None, True)):
        chain = chain_of(cipher, checkpoint=True)
        with server_of(tmp_path / str(expected), cipher) as served:
            served.spill(*chain)
            text = whole_directory(tmp_path / str(expected)) if is_open else b""
        text = text or whole_directory(tmp_path / str(expected))
        for block in chain:
            assert all((secret in text) is expected for secret in secrets_of(block))


def test_forged_bytes_are_a_miss_and_counted(directory: Path) -> None:
    chain = chain_of(CIPHER, checkpoint=True)
    with server_of(directory) as served:
        served.settle()
        forge(Path(served.path(chain[1])), flip_at=7)
        served.storage.get_into(*plan(chain))
        (loaded,) = [outcome for outcome in served.take() if isinstance(outcome, BlocksLoaded)]
        stats = served.stats()
        assert [block.header for block in loaded.blocks] == [chain[0].header]
        assert loaded.failure is not None and loaded.failure.cause is BlockDamage.AUTH_TAG
        assert (stats.integrity.seal_failure_total, stats.integrity.quarantined_file_count) == (1, 1)
        assert_holds(loaded, chain[:1])


def test_a_block_in_the_clear_is_not_taken_for_an_encrypted_one(directory: Path, tmp_path: Path) -> None:
    """Whoever knows a block's tokens and name can write that file; without the key it is not believed."""
    (block, *_) = chain_of(CIPHER, checkpoint=True)
    with StorageThread(tmp_path / "forger", fingerprint=block.header.fingerprint) as forger:
        clear = make_block(fingerprint=block.header.fingerprint)
        forger.spill(clear)
        planted = Path(forger.path(clear)).read_bytes()
    with server_of(directory) as served:
        Path(served.path(block)).write_bytes(planted)
        served.storage.get_into(*plan([block]))
        (failed,) = [outcome for outcome in served.take() if isinstance(outcome, StorageFailure)]
    assert failed.cause is BlockDamage.AUTH_TAG


@pytest.mark.parametrize("cipher", [None, OTHER_CIPHER], ids=["no key", "another key"])
@pytest.mark.parametrize("loss", ["nothing", "clean mark", "manifest", "rows", "times"])
def test_whoever_lacks_the_key_keeps_the_blocks(directory: Path, cipher: Cipher | None, loss: str) -> None:
    """Another key's blocks are weighed, kept whatever was lost beside them, and read again with their key."""
    chain = chain_of(CIPHER, checkpoint=True)
    paths = server_of(directory).storage._store.paths
    if loss == "clean mark":
        os.unlink(paths.clean_mark)
    elif loss == "manifest":
        os.unlink(paths.manifest)
    elif loss == "rows":
        store = OfflineStore(str(directory), files=Files(), clock=ManualClock())
        records = store.rows().records
        manifest = Manifest.open(paths.manifest)
        manifest.delete([record.hash for record in records])
        manifest.close()
    elif loss == "times":
        for path in directory.rglob("*.safetensors"):
            os.utime(path, ns=(1, 1))
        os.unlink(paths.clean_mark)
    with server_of(directory, cipher) as served:
        assert served.take_inventory() == ()
        stats = served.stats()
        assert (stats.disk.other_model_block_count, stats.integrity.quarantined_file_count) == (3, 0)
        assert stats.last_reconcile.unencrypted_block_count == 0, "they are taken for blocks in the clear"
        served.storage.verify()
        served.settle()
        assert served.stats().integrity.damaged_block_total == 0
        mine = chain_of(cipher, 1)
        served.spill(*mine)
        served.storage.get_into(*plan(mine))
        assert any(isinstance(outcome, BlocksLoaded) for outcome in served.take())
    check_is_clean(directory)
    with server_of(directory) as served:
        assert known(served) == [True] * 3
        served.storage.get_into(*plan(chain))
        (loaded,) = [outcome for outcome in served.take() if isinstance(outcome, BlocksLoaded)]
        assert_holds(loaded, chain)


def test_another_keys_blocks_age_out_within_the_same_limit(directory: Path) -> None:
    newer = chain_of(OTHER_CIPHER, 3, seed=5)
    file_bytes = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    with server_of(directory, OTHER_CIPHER) as served:
        used_bytes = served.stats().disk.used_bytes
    with server_of(directory, OTHER_CIPHER, limit_bytes=used_bytes + file_bytes // 3) as served:
        served.spill(*newer)
        stats = served.stats()
    assert stats.ssd.evicted_block_total >= 2 and stats.disk.other_model_block_count < 3


def test_blocks_from_before_the_key_are_told_and_can_be_wiped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = chain_of(None), chain_of(CIPHER)
    with server_of(tmp_path, None) as served:
        served.spill(*old)
    with caplog.at_level(logging.WARNING), server_of(tmp_path) as served:
        served.spill(*new)
    (warning,) = [record for record in caplog.records if record.message == "unencrypted_blocks_found"]
    assert vars(warning)["blocks"] == 3
    offline = OfflineStore(str(tmp_path), files=Files(), clock=ManualClock())
    rows = offline.rows()
    secrets = [secret for block in old for secret in secrets_of(block)]
    assert all(secret in whole_directory(tmp_path) for secret in secrets)
    removed = offline.purge(
        lambda record: KEY_DETAIL not in rows.fingerprints[record.fingerprint],
        scope=PurgeScope.CLEAR_TEXT,
        progress=lambda done, total: None,
    )
    assert removed[0] == 3
    assert not [secret for secret in secrets if secret in whole_directory(tmp_path)]
    caplog.clear()
    with caplog.at_level(logging.WARNING), server_of(tmp_path) as served:
        assert known(served) == [True] * 3
    assert caplog.records == []


def test_a_purge_leaves_no_page_of_the_manifest_unwiped(tmp_path: Path) -> None:
    with server_of(tmp_path, None) as served:
        served.spill(*chain_of(None, 60))
    offline = OfflineStore(str(tmp_path), files=Files(), clock=ManualClock())
    offline.purge(lambda _: True, scope=PurgeScope.CHOSEN, progress=lambda done, total: None)
    connection = sqlite3.connect(tmp_path / "manifest.sqlite3")
    assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
    connection.close()


def test_a_directory_deleted_under_a_server_is_readable_after_its_next_start(tmp_path: Path) -> None:
    """What is written from then on is written under the data key that the server has in memory."""
    directory, files = tmp_path / "cache", Files()
    paths = StorePaths(str(directory))

    def cipher_of_a_start() -> Cipher:
        files.make_dir(str(directory))
        opened = open_key(files, paths, master_key=bytes(32))
        return Cipher(opened.data_key, wrapped_key=opened.wrapped)

    cipher = cipher_of_a_start()
    blocks = chain_of(cipher, 2)
    with server_of(directory, cipher) as served:
        shutil.rmtree(directory)
        served.spill(blocks[0])
        served.clock.advance(100)
        served.spill(*blocks)
    again = cipher_of_a_start()
    assert again.key_id == cipher.key_id
    with server_of(directory, again) as served:
        served.take()
        served.storage.get_into(*plan(blocks))
        loaded = next(o for o in served.take() if isinstance(o, BlocksLoaded))
        assert_holds(loaded, blocks)
