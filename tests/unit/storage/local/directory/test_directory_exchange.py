"""Exchange: blocks go from directory to directory, whole or not at all, and no crash leaves a lie."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.errors import NotFound, StartError, StorageError
from icehouse_server.storage.archive import ArchiveHeader, ArchiveWriter, BlockEntry
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.directory_exchange import (
    BlockRefusal,
    ExportReport,
    ExportSource,
    ImportReport,
    ImportTarget,
)
from icehouse_server.storage.local.directory.offline import OfflineStore
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, encrypted_fingerprint
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import FINGERPRINT, OTHER_FINGERPRINT, make_block, make_chain
from tests.fixtures.storage.ciphers import CIPHER
from tests.fixtures.storage.faults import Crash, CrashingFiles, FaultyFiles
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread

CHAIN = make_chain(3)
TAIL = make_block(parent=CHAIN[-1].header.hash, start=48, seed=7, token_ids=(1, 2, 3))
BLOCKS = [*CHAIN, TAIL]


def fill(directory: Path, blocks: Iterable[HostBlock] = BLOCKS, **settings: object) -> None:
    with StorageThread(directory, **settings) as served:
        served.spill(*blocks)


def offline(directory: Path) -> OfflineStore:
    return OfflineStore(str(directory), files=Files(), clock=ManualClock())


def export(directory: Path, **chosen: str) -> tuple[list[bytes], ExportReport]:
    *parts, report = ExportSource(offline(directory), files=Files()).stream(**chosen)
    assert isinstance(report, ExportReport)
    return [part for part in parts if isinstance(part, bytes)], report


def adopt(
    directory: Path, parts: Iterable[bytes], *, files: object = None, limit_bytes: int = 1 << 30
) -> ImportReport:
    target = ImportTarget(
        str(directory),
        files=files or Files(),  # type: ignore[arg-type]
        clock=ManualClock(),
        limit_bytes=limit_bytes,
        free_floor_bytes=0,
    )
    return target.adopt(parts)


def hashes(directory: Path) -> set[bytes]:
    """Return what is stored, after the next start of a server, which finds nothing wrong."""
    with StorageThread(directory) as served:
        names = {record.hash for record in served.take_inventory()}
    store = offline(directory)
    assert store.check(progress=lambda _: None)[0] == []
    assert all(verdict.damage is None for verdict in store.verify(store.rows().records))
    return names


def names(blocks: Iterable[HostBlock]) -> set[bytes]:
    return {block.header.hash for block in blocks}


def partials(directory: Path) -> list[Path]:
    return list(directory.rglob("*.partial"))


def test_a_directory_is_copied_through_an_archive(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    parts, exported = export(tmp_path / "a")
    assert (exported.block_count, exported.left_out_count) == (4, 0)
    report = adopt(tmp_path / "b", parts)
    assert (report.adopted_count, report.known_count, report.stop_detail) == (4, 0, "")
    # The manifest agrees before any server looked.
    assert offline(tmp_path / "b").check(progress=lambda _: None)[0] == []
    assert hashes(tmp_path / "b") == names(BLOCKS)
    assert offline(tmp_path / "b").rows().fingerprints == {FINGERPRINT: {"architecture": "test"}}
    again = adopt(tmp_path / "b", parts)
    assert (again.adopted_count, again.known_count) == (0, 4)


def test_one_prompt_is_exported_by_its_last_block(tmp_path: Path) -> None:
    fill(tmp_path / "a", [*BLOCKS, *make_chain(2, seed=5)])
    parts, _ = export(tmp_path / "a", block=CHAIN[1].header.hash.hex()[:12])
    adopt(tmp_path / "b", parts)
    assert hashes(tmp_path / "b") == names(CHAIN[:2])


def test_an_archive_has_one_model(tmp_path: Path) -> None:
    fill(tmp_path / "a", make_chain(1))
    fill(tmp_path / "a", make_chain(1, fingerprint=OTHER_FINGERPRINT), fingerprint=OTHER_FINGERPRINT)
    with pytest.raises(NotFound, match=r"2 .*11111111.*22222222"):
        export(tmp_path / "a")
    assert export(tmp_path / "a", fingerprint="2222")[1].block_count == 1


def test_the_archive_of_another_model_is_refused_by_both_names(tmp_path: Path) -> None:
    fill(tmp_path / "a", make_chain(1, fingerprint=OTHER_FINGERPRINT), fingerprint=OTHER_FINGERPRINT)
    fill(tmp_path / "b", make_chain(1))
    with pytest.raises(StorageError) as caught:
        adopt(tmp_path / "b", export(tmp_path / "a")[0])
    assert OTHER_FINGERPRINT.hex() in caught.value.message and FINGERPRINT.hex() in caught.value.message
    assert hashes(tmp_path / "b") == names(make_chain(1))


def test_neither_takes_a_directory_from_a_server(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    parts, _ = export(tmp_path / "a")
    with StorageThread(tmp_path / "a"):
        with pytest.raises(StartError):
            export(tmp_path / "a")
        with pytest.raises(StartError):
            adopt(tmp_path / "a", parts)


def test_a_damaged_block_and_those_behind_it_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    path = StorePaths(str(tmp_path / "a")).block(FINGERPRINT, CHAIN[1].header.hash)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    parts, report = export(tmp_path / "a")
    assert (report.block_count, report.left_out_count) == (1, 3)
    adopt(tmp_path / "b", parts)
    assert hashes(tmp_path / "b") == names(CHAIN[:1])


def test_an_archive_cut_at_every_record_is_adopted_up_to_there(tmp_path: Path) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    for count in range(len(parts)):
        report = adopt(tmp_path / f"b{count}", parts[:count])
        assert "ends too early" in report.stop_detail
        assert report.adopted_count == max(0, (count - 1) // 3)
        assert not partials(tmp_path / f"b{count}")
    assert hashes(tmp_path / f"b{len(parts) - 1}") == names(CHAIN)


def test_a_flipped_byte_of_a_block_ends_the_adoption_before_it(tmp_path: Path) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    second = bytearray(parts[5])
    second[len(second) // 2] ^= 1
    parts[5] = bytes(second)
    report = adopt(tmp_path / "b", parts)
    assert "checksum" in report.stop_detail and report.adopted_count == 1
    assert not partials(tmp_path / "b") and hashes(tmp_path / "b") == names(CHAIN[:1])


def forged(parts: list[bytes], *, data: bytes) -> list[bytes]:
    """Return an archive whose second block is something else, with right checksums throughout."""
    writer = ArchiveWriter()
    out = [writer.begin(ArchiveHeader(FINGERPRINT, 16, {}))]
    for number, block in enumerate(CHAIN):
        body = data if number == 1 else parts[2 + 3 * number]
        header = block.header
        entry = BlockEntry(
            header.hash, header.parent, header.start_token_index, header.token_count, len(body)
        )
        out.append(writer.block(entry))
        writer.part(body)
        out += [body, writer.end_block()]
    return [*out, writer.end()]


@pytest.mark.parametrize("what", ["another block", "nonsense", "a changed byte"])
def test_a_forged_block_with_right_checksums_is_refused_with_those_behind_it(
    tmp_path: Path, what: str
) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    changed = bytearray(parts[5])
    changed[-1] ^= 1
    data = {"another block": parts[8], "nonsense": b"\xff" * 100, "a changed byte": bytes(changed)}[what]
    report = adopt(tmp_path / "b", forged(parts, data=data))
    assert report.refused == {BlockRefusal.DAMAGED: 1, BlockRefusal.PARENT_MISSING: 1}
    assert report.stop_detail == "" and not partials(tmp_path / "b")
    assert hashes(tmp_path / "b") == names(CHAIN[:1])


def test_the_size_limit_holds(tmp_path: Path) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, exported = export(tmp_path / "a")
    limit_bytes = (5 << 20) + exported.size_bytes // 2
    report = adopt(tmp_path / "b", parts, limit_bytes=(4 << 20))
    assert report.adopted_count == 0 and report.refused[BlockRefusal.SSD_FULL] == 1
    assert report.refused[BlockRefusal.PARENT_MISSING] == 2
    assert adopt(tmp_path / "c", parts, limit_bytes=limit_bytes).adopted_count == 3


@pytest.mark.parametrize("verb, number", [("write", 3), ("fsync", 2), ("rename", 2), ("create", 4)])
def test_a_disk_that_is_full_in_the_middle_keeps_what_was_adopted(
    tmp_path: Path, verb: str, number: int
) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    files = FaultyFiles(verb, number, errno.ENOSPC)
    files.is_armed = True
    report = adopt(tmp_path / "b", parts, files=files)
    assert files.failed_count == 1 and "disk refused" in report.stop_detail
    assert report.adopted_count == 1 and not partials(tmp_path / "b")
    assert hashes(tmp_path / "b") == names(CHAIN[:1])


@pytest.mark.parametrize("is_kill", [True, False])
def test_a_crash_at_any_step_leaves_whole_blocks_and_no_garbage(tmp_path: Path, is_kill: bool) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    step = 0
    while True:
        step += 1
        directory = tmp_path / f"b{step}"
        files = CrashingFiles(step, is_kill=is_kill)
        files.is_armed = True
        try:
            adopt(directory, parts, files=files)
        except Crash:
            stored = hashes(directory)
            assert stored in [names(CHAIN[:count]) for count in range(4)], step
            assert not partials(directory)
            assert adopt(directory, parts).stop_detail == ""
            assert hashes(directory) == names(CHAIN)
        else:
            break
    assert step > 20


def test_what_an_archive_says_of_its_model_commands_no_terminal_and_replaces_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    hostile = ArchiveHeader(FINGERPRINT, 16, {"a\x1b[31m": "\u202eb" + "c" * 1000})
    header = ArchiveWriter().begin(hostile)
    adopt(tmp_path / "b", [header, *parts[1:]])
    [(name, value)] = offline(tmp_path / "b").rows().fingerprints[FINGERPRINT].items()
    assert name == "a?[31m" and value.startswith("?bccc") and len(value) == 256
    assert hashes(tmp_path / "b") == names(CHAIN)
    adopt(tmp_path / "b", [header])
    assert offline(tmp_path / "b").rows().fingerprints == {FINGERPRINT: {"architecture": "test"}}


def test_blocks_in_the_clear_do_not_come_beside_a_key(tmp_path: Path) -> None:
    fill(tmp_path / "a", CHAIN)
    parts, _ = export(tmp_path / "a")
    target = ImportTarget(
        str(tmp_path / "b"),
        files=Files(),
        clock=ManualClock(),
        limit_bytes=1 << 30,
        free_floor_bytes=0,
        cipher=CIPHER,
    )
    with pytest.raises(StorageError, match="in the clear"):
        target.adopt(parts)


def test_encrypted_blocks_stay_encrypted_and_need_their_key(tmp_path: Path) -> None:
    cipher = CIPHER
    fingerprint = encrypted_fingerprint(FINGERPRINT, cipher.key_id)
    chain = make_chain(2, fingerprint=fingerprint, cipher=cipher)
    how = {
        "cipher": cipher,
        "fingerprint": fingerprint,
        "details": {KEY_DETAIL: cipher.key_id.hex()},
    }
    fill(tmp_path / "a", chain, **how)
    parts, _ = export(tmp_path / "a")
    ids = chain[0].header.token_ids
    assert str(list(ids[:4]))[1:-1].encode() not in b"".join(parts)
    with pytest.raises(StorageError, match=cipher.key_id.hex()):
        adopt(tmp_path / "b", parts)
    # A directory that has had the key takes them.
    fill(tmp_path / "c", [], **how)
    assert adopt(tmp_path / "c", parts).adopted_count == 2
