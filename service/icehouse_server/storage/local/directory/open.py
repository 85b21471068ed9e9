"""Opening of the SSD tier: from a directory in any state to rows and files that agree."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from collections.abc import Iterable, Mapping

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import UNRECORDED_CODE, ReconcileReport
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.disk_error import DiskErrorKind, LaterManifest, classify
from icehouse_server.storage.files import Files, remove, size_at
from icehouse_server.storage.local.directory.lock import check_trust, take_mark
from icehouse_server.storage.local.directory.manifest import BlockRecord, Manifest
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding, Scan
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher
from icehouse_server.storage.storage_settings import CODE_DETAIL
from icehouse_server.storage.store_paths import StorePaths, parse_block_name

_log = logging.getLogger(__name__)

_MADE_ANEW = "rows are made anew from the files, without pins and times of use"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedStore:
    """A directory whose rows and files agree."""

    manifest: Manifest
    records: list[BlockRecord]
    """All fingerprints' records, from the least to the most recently used."""
    quarantined: dict[BlockHash, int]
    """Bytes by hash, oldest first."""
    unknown_bytes: int
    """Bytes of files in our folders that we did not name."""
    report: ReconcileReport


def open_store(paths: StorePaths, *, files: Files, clock: Clock, cipher: Cipher | None = None) -> OpenedStore:
    """Open the manifest, reconcile it with the files and return what is usable.

    The caller holds the directory's lock. Raises `OSError` or `sqlite3.Error` if the disk
    refuses, `StartError` if others can change something there; running it again is safe.
    """
    _prepare(files, paths, cipher)
    started = clock.monotonic()
    is_clean = take_mark(files, paths)
    manifest, rows, edited, is_rebuilt = _load_manifest(files, paths, check_pages=not is_clean)
    try:
        now_time = clock.wall()
        # Rows are in the order of their use, so the last one decides.
        if rows and rows[-1].last_used_time > now_time:
            manifest.forget_future(now_time)
            rows = [row.used_by_now(now_time) for row in rows]
        scan = Scan(rows, edited, files=files, paths=paths, now_time=now_time, cipher=cipher)
        is_clean = is_clean and not edited and not is_rebuilt
        records = rows
        if not is_clean:
            records = scan.reconcile(manifest)
            records.sort(key=lambda record: record.last_used_time)
        duration_s = clock.monotonic() - started
        known = manifest.fingerprints()
        quarantined = {
            block_hash: info.size_bytes
            for info in sorted(files.list(paths.quarantine), key=lambda info: info.mtime_ns)
            if (block_hash := parse_block_name(info.name)) is not None
        }
    except BaseException:
        manifest.close(checkpoint=False)
        raise
    counts = scan.counts
    report = ReconcileReport(
        reconcile_time=now_time,
        duration_s=duration_s,
        clean=is_clean,
        manifest_rebuilt=is_rebuilt,
        row_count=len(rows) + len(edited),
        file_count=scan.file_count,
        partial_deleted_count=counts[ReconcileFinding.PARTIAL],
        adopted_count=counts[ReconcileFinding.ADOPTABLE]
        + counts[ReconcileFinding.REPLACED]
        + counts[ReconcileFinding.EDITED_ROW],
        quarantined_count=counts[ReconcileFinding.INVALID] + counts[ReconcileFinding.DIFFERS],
        row_deleted_count=counts[ReconcileFinding.MISSING],
        other_layout_deleted_count=counts[ReconcileFinding.OTHER_ABI],
        unknown_file_count=counts[ReconcileFinding.UNKNOWN],
        restamped_count=counts[ReconcileFinding.RESTAMPED],
        unencrypted_block_count=sum(
            cipher is not None and KEY_DETAIL not in known[record.fingerprint] for record in records
        ),
    )
    return OpenedStore(manifest, records, quarantined, scan.unknown_bytes, report)


def _prepare(files: Files, paths: StorePaths, cipher: Cipher | None) -> None:
    """Create the folders, and check that everything there is ours."""
    for path in (paths.root, paths.blocks, paths.quarantine):
        files.make_dir(path)
    # Since the lock was taken somebody may have put a link where SQLite will look.
    check_trust(files, paths)
    files.fsync_dir(paths.root)
    if cipher is not None and cipher.wrapped_key:
        # Imported here because, like the cipher, it needs an optional extra.
        from icehouse_server.storage.local.directory.data_keys import restore_key

        restore_key(files, paths, wrapped=cipher.wrapped_key)


def changed_code(
    own: Mapping[str, str], known: Mapping[Fingerprint, Mapping[str, str]], records: Iterable[BlockRecord]
) -> tuple[str, ...]:
    """Return the modules that have changed since the newest blocks that differ from a model's details only in
    code; empty if there are none. For a model without blocks of its own."""
    used: dict[Fingerprint, float] = {}
    for record in records:
        used[record.fingerprint] = max(record.last_used_time, used.get(record.fingerprint, 0.0))
    for fingerprint in sorted(used, key=used.__getitem__, reverse=True):
        other = known[fingerprint]
        without_code = {name: value for name, value in other.items() if not name.startswith(CODE_DETAIL)}
        if without_code.items() <= own.items():
            if len(without_code) == len(other):
                return (UNRECORDED_CODE,)
            names = {name for name in {*own, *other} if own.get(name) != other.get(name)}
            return tuple(sorted(name.removeprefix(CODE_DETAIL) for name in names))
    return ()


def _load_manifest(
    files: Files, paths: StorePaths, *, check_pages: bool
) -> tuple[Manifest, list[BlockRecord], list[BlockHash], bool]:
    """Return the open manifest, its rows and edited rows, and whether rows must be rebuilt from files."""
    existed = create_private(files, paths)
    # To SQLite a file without a byte is a database without a table.
    has_content = existed and bool(size_at(files, paths.manifest))
    aside = paths.manifest_aside
    try:
        manifest = Manifest.open(paths.manifest)
        try:
            complaint = manifest.complaint(check_pages=check_pages) if has_content else ""
            if not complaint:
                is_lost = not has_content and _has_files(files, paths)
                if is_lost:
                    what = "it was empty" if existed else "there was none"
                    _log.warning("manifest_lost", extra={"detail": f"{what}; {_MADE_ANEW}"})
                return manifest, *manifest.load(check_facts=check_pages), is_lost
        except BaseException:
            manifest.close(checkpoint=False)
            raise
        manifest.close(checkpoint=False)
    except sqlite3.DatabaseError as error:
        if classify(error) not in (DiskErrorKind.FOREIGN, DiskErrorKind.DAMAGED):
            # The disk refuses (full, locked, I/O): moving the manifest aside would not help.
            raise
        if isinstance(error, LaterManifest):
            aside = paths.manifest_later
        complaint = str(error)
    # Moved aside for a person to inspect.
    _log.warning("manifest_moved_aside", extra={"path": aside, "detail": f"{complaint}; {_MADE_ANEW}"})
    _remove_logs(files, paths)
    files.rename(paths.manifest, aside)
    create_private(files, paths)
    return Manifest.open(paths.manifest), [], [], True


def _has_files(files: Files, paths: StorePaths) -> bool:
    """Return whether there may be block files."""
    folders = (folder for folder in files.list(paths.blocks) if folder.is_directory)
    return any(files.list(f"{paths.blocks}/{folder.name}") for folder in folders)


def create_private(files: Files, paths: StorePaths) -> bool:
    """Create the manifest's file so that SQLite keeps its mode; return whether it existed already."""
    # We write rows through a log. SQLite would trust a rollback journal before we can check any of it, even
    # the name of a file to remove.
    remove(files, paths.manifest + "-journal")
    try:
        files.close(files.create(paths.manifest))
    except FileExistsError:
        return True
    _remove_logs(files, paths)
    return False


def _remove_logs(files: Files, paths: StorePaths) -> None:
    """Remove a manifest's logs: they must never be replayed into another one."""
    for suffix in ("-wal", "-shm"):
        remove(files, paths.manifest + suffix)
