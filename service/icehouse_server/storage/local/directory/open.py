"""Opening of the SSD tier: from a directory in any state to rows and files that agree."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from collections.abc import Mapping, Sequence

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import UNRECORDED_CODE, ReconcileReport
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import DiskErrorKind, classify
from icehouse_server.storage.files import Files, remove
from icehouse_server.storage.local.directory.lock import check_trust, snapshot, take_mark
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.reconcile import Finding, Walk, reconcile
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.local.directory.space import SECONDS_PER_DAY
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.paths import StorePaths, parse_block_name
from icehouse_server.storage.settings import CODE_DETAIL, StorageSettings

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedStore:
    """A directory whose rows and files agree."""

    manifest: Manifest
    records: list[BlockRecord]
    """Of all fingerprints, from the least to the most recently used."""
    quarantined: dict[BlockHash, int]
    """Bytes by hash, oldest first."""
    unknown_bytes: int
    """Files in our folders that we did not name."""
    report: ReconcileReport


def open_store(
    settings: StorageSettings, *, paths: StorePaths, files: Files, clock: Clock, cipher: Cipher | None = None
) -> OpenedStore:
    """Open the manifest, reconcile it with the files and return what is usable.

    The directory is locked by the caller. Raises `OSError` or `sqlite3.Error` when the disk
    refuses, `StartError` when something there is not ours alone; running it again is safe.
    """
    _prepare(files, paths, cipher)
    started = clock.monotonic()
    is_clean = _matches_mark(files, paths)
    manifest, rows, edited, rebuilt = _load_manifest(files, paths, check_pages=not is_clean)
    try:
        now_time = clock.wall()
        walk = Walk(rows, edited, files=files, paths=paths, now_time=now_time, cipher=cipher)
        unknown_bytes = 0
        if any(record.last_used_time > now_time for record in rows[-1:]):
            # They come in the order of their use, so the last one tells.
            manifest.forget_future(now_time)
        if is_clean and not edited and not rebuilt:
            records = rows
        else:
            day = int(now_time // SECONDS_PER_DAY)
            records = reconcile(walk, files=files, paths=paths, manifest=manifest, day=day)
            records.sort(key=lambda record: record.last_used_time)
            unknown_bytes = walk.unknown_bytes
        walked = clock.monotonic()
        files.make_dir(paths.folder(settings.fingerprint))
        files.fsync_dir(paths.blocks)
        manifest.add_fingerprint(
            settings.fingerprint, details=dict(settings.fingerprint_details), now_time=now_time
        )
        quarantined = _quarantined(files, paths)
    except BaseException:
        manifest.close(checkpoint=False)
        raise
    counts = walk.counts
    report = ReconcileReport(
        reconcile_time=now_time,
        duration_s=walked - started,
        clean=records is rows,
        manifest_rebuilt=rebuilt,
        row_count=len(rows) + len(edited),
        file_count=walk.file_count,
        partial_deleted_count=counts[Finding.PARTIAL],
        adopted_count=counts[Finding.ADOPTABLE] + counts[Finding.REPLACED] + counts[Finding.EDITED_ROW],
        quarantined_count=counts[Finding.INVALID] + counts[Finding.DIFFERS],
        row_deleted_count=counts[Finding.MISSING],
        other_layout_deleted_count=counts[Finding.OTHER_ABI],
        unknown_file_count=counts[Finding.UNKNOWN],
        restamped_count=counts[Finding.RESTAMPED],
        unencrypted_block_count=_unencrypted_count(manifest, records) if cipher else 0,
        changed_code=_changed_code(settings, manifest, records),
    )
    return OpenedStore(manifest, records, quarantined, unknown_bytes, report)


def _quarantined(files: Files, paths: StorePaths) -> dict[BlockHash, int]:
    """Return the bytes of what is set aside, by hash, oldest first."""
    return {
        block_hash: info.size_bytes
        for info in sorted(files.list(paths.quarantine), key=lambda info: info.mtime_ns)
        if (block_hash := parse_block_name(info.name)) is not None
    }


def _prepare(files: Files, paths: StorePaths, cipher: Cipher | None) -> None:
    """Make the folders, see that all that is there is ours, and that the key is."""
    for path in (paths.root, paths.blocks, paths.quarantine):
        files.make_dir(path)
    # Since the lock was taken somebody may have put a link where SQLite will look.
    check_trust(files, paths)
    files.fsync_dir(paths.root)
    if cipher is not None and cipher.wrapped_key:
        _put_key_back(files, paths, wrapped=cipher.wrapped_key)


def _put_key_back(files: Files, paths: StorePaths, *, wrapped: bytes) -> None:
    """Have the key file say what blocks are written under, where the directory was made anew."""
    # Of an optional extra, like the cipher itself.
    from icehouse_server.storage.local.directory.data_keys import keep_key

    keep_key(files, paths, wrapped=wrapped)


def _unencrypted_count(manifest: Manifest, records: Sequence[BlockRecord]) -> int:
    """Return how many blocks were written before there was a key."""
    encrypted = {name for name, details in manifest.fingerprints().items() if KEY_DETAIL in details}
    return sum(record.fingerprint not in encrypted for record in records)


def _changed_code(
    settings: StorageSettings, manifest: Manifest, records: Sequence[BlockRecord]
) -> tuple[str, ...]:
    """Say which code is another than that of the newest blocks that are this model's but for code."""
    known = manifest.fingerprints()
    own = dict(settings.fingerprint_details)
    stored = dict.fromkeys(record.fingerprint for record in reversed(records))
    if settings.fingerprint in stored:
        return ()
    for fingerprint in stored:
        other = known[fingerprint]
        if _without_code(other).items() <= own.items():
            names = {name for name in {*own, *other} if own.get(name) != other.get(name)}
            if len(_without_code(other)) == len(other):
                return (UNRECORDED_CODE,)
            return tuple(sorted(name.removeprefix(CODE_DETAIL) for name in names))
    return ()


def _without_code(details: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in details.items() if not name.startswith(CODE_DETAIL)}


def _matches_mark(files: Files, paths: StorePaths) -> bool:
    """Say whether the directory is as the last clean shutdown left it. The mark is used up."""
    mark = take_mark(files, paths)
    if mark is None:
        return False
    try:
        return snapshot(files, paths) == mark
    except FileNotFoundError:
        return False


def _load_manifest(
    files: Files, paths: StorePaths, *, check_pages: bool
) -> tuple[Manifest, list[BlockRecord], list[BlockHash], bool]:
    """Return the open manifest, its rows and edited rows, and whether it was made anew beside blocks."""
    existed = create_private(files, paths)
    try:
        manifest = Manifest.open(paths.manifest)
        try:
            if not existed or manifest.is_sound(check_pages=check_pages):
                has_blocks = bool(files.list(paths.blocks))
                return manifest, *manifest.load(check_facts=check_pages), not existed and has_blocks
        except BaseException:
            manifest.close(checkpoint=False)
            raise
        manifest.close(checkpoint=False)
    except sqlite3.DatabaseError as error:
        if classify(error) not in (DiskErrorKind.FOREIGN, DiskErrorKind.DAMAGED):
            # The disk refuses (full, locked, I/O): moving the manifest aside would not help.
            raise
        _log.warning("manifest_moved_aside", extra={"detail": str(error)})
    _move_aside(files, paths)
    create_private(files, paths)
    return Manifest.open(paths.manifest), [], [], True


def create_private(files: Files, paths: StorePaths) -> bool:
    """Make the manifest's file so that SQLite keeps its mode; say whether there was one already."""
    # Rows are written by way of a log. What a rollback journal says SQLite believes before we see any of it,
    # the name of a file to remove included.
    remove(files, paths.manifest + "-journal")
    try:
        files.close(files.create(paths.manifest))
    except FileExistsError:
        return True
    # A log of another manifest must never be replayed into the new one.
    for suffix in ("-wal", "-shm"):
        remove(files, paths.manifest + suffix)
    return False


def _move_aside(files: Files, paths: StorePaths) -> None:
    """Keep the unreadable manifest for a person to look at; its logs first, or they would outlive it."""
    for suffix in ("-wal", "-shm"):
        remove(files, paths.manifest + suffix)
    files.rename(paths.manifest, paths.manifest_aside)
