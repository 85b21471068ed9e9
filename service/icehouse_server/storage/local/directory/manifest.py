"""Manifest: one SQLite row per committed block. The row is the commit.

Owned by the storage thread; SQLite refuses any other. WAL with `synchronous=NORMAL`: a power
cut may lose the newest rows but never leaves a torn database, and the next start repairs a
lost row (a file without a row is adopted, a row without a file is deleted).
Every method raises `sqlite3.Error` if the database cannot do its work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import operator
import sqlite3
import struct
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from sqlite_utils import Database

from icehouse_server.domain.blocks import LAYOUT_ABI, BlockDamage, RegionKind, pack_tokens
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import LearnedRates
from icehouse_server.storage.files import FileInfo
from icehouse_server.storage.local.block_format.file_region import regions_to_json
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.schema import check_schema, migrations
from icehouse_server.storage.store_paths import StorePaths

_FACTS = struct.Struct("<32s32s32s10qQ")
_FACT_COUNT = 14


class BlockRecord(NamedTuple):
    """One committed block; sizes in bytes.

    A tuple and not a frozen dataclass as elsewhere: a start makes 100,000 of them, in a quarter of the time.
    The fields up to `header_checksum` are facts about the file and change only with the file;
    the rest is the block's history.
    """

    hash: BlockHash
    parent: BlockHash
    fingerprint: Fingerprint
    start_token_index: int
    token_count: int
    block_token_limit: int
    kv_bytes: int
    window_bytes: int
    checkpoint_bytes: int
    file_bytes: int
    mtime_ns: int
    """The file's modification time when the row was written; if it differs, the file is read again."""
    inode: int
    """The file's inode number at that time; if it differs, the file is read again."""
    layout_abi: int
    header_checksum: int
    created_time: float
    last_used_time: float
    """Wall clock, seconds since the epoch."""
    hit_count: int
    pin_end_time: float
    """Wall clock; `DiskIndex.end_pins` clears it then."""

    @property
    def depth(self) -> int:
        """Blocks of this chain before this one."""
        return self.start_token_index // self.block_token_limit

    @property
    def is_pinned(self) -> bool:
        return self.pin_end_time > NOT_PINNED

    def region_bytes(self, kind: RegionKind) -> int:
        """Return the bytes of the region of this kind; 0 if the block has none."""
        return int(getattr(self, f"{kind}_bytes"))

    def used_by_now(self, now_time: float) -> BlockRecord:
        """Return this without uses in the future: a clock that was once wrong must not retain it for ever."""
        return self._replace(
            last_used_time=min(self.last_used_time, now_time), created_time=min(self.created_time, now_time)
        )

    def with_history_of(self, other: BlockRecord) -> BlockRecord:
        """Return these facts with another record's history."""
        return BlockRecord._make((*self[:_FACT_COUNT], *other[_FACT_COUNT:]))

    def is_of(self, file: BlockFile) -> bool:
        """Return whether every fact matches this file."""
        return record_of(file, mtime_ns=self.mtime_ns, inode=self.inode, used_time=0.0)._facts == self._facts

    def is_stamped(self, info: FileInfo) -> bool:
        """Return whether a directory entry looks like the file this row was written for."""
        return (self.mtime_ns, self.inode, self.file_bytes) == (info.mtime_ns, info.inode, info.size_bytes)

    def facts_checksum(self) -> int:
        """Return the xxh3 of the facts; it is stored in the row, so that a row edited by hand is detected."""
        return xxhash.xxh3_64_intdigest(_FACTS.pack(*self._facts))

    @property
    def _facts(self) -> tuple[object, ...]:
        return self[:_FACT_COUNT]


def record_of(file: BlockFile, *, mtime_ns: int, inode: int, used_time: float) -> BlockRecord:
    """Return the record of a file that is being committed or adopted."""
    return BlockRecord(
        **dataclasses.asdict(file.outline),
        kv_bytes=file.region_bytes(RegionKind.KV),
        window_bytes=file.region_bytes(RegionKind.WINDOW),
        checkpoint_bytes=file.region_bytes(RegionKind.CHECKPOINT),
        file_bytes=file.file_bytes,
        mtime_ns=mtime_ns,
        inode=inode,
        layout_abi=LAYOUT_ABI,
        header_checksum=file.header_checksum,
        created_time=used_time,
        last_used_time=used_time,
        hit_count=0,
        pin_end_time=NOT_PINNED,
    )


_RENAMED = {"fingerprint": "fingerprint_id", "header_checksum": "header_xxh3", "pin_end_time": "pinned"}
_COLUMNS = [_RENAMED.get(field, field) for field in BlockRecord._fields]
"""Columns of table `blocks`, in the order of a record's fields."""
_INSERTED = [*_COLUMNS, "depth", "file", "row_xxh3"]
_INSERT = f"INSERT OR REPLACE INTO blocks ({', '.join(_INSERTED)}) VALUES ({', '.join('?' * len(_INSERTED))})"
_SMALL_TABLES = ("fingerprints", "rates", "written_days")
_RATES = ", ".join(field.name for field in dataclasses.fields(LearnedRates))
"""Columns of table `rates`, in the order of the fields."""
LOG_ALLOWANCE_BYTES = 4 << 20
"""What the size limit reserves for the write-ahead log, its index and the next rows."""
_LOG_LIMIT_PAGES = 256
GROWTH_ALLOWANCE_BYTES = _LOG_LIMIT_PAGES * 4096
"""How much one row may grow the database: a checkpoint adds all pages of the log."""
_VALUE_LIMIT_BYTES = 16 << 20
"""Most bytes of a value or a row: far more than a block's token ids and regions take."""
_OPENING_LIMIT_STEPS = 10_000_000
"""Virtual machine steps that one statement may take during opening: about a second."""
_COUNT_LIMIT = 1 << 62
"""No real count is larger. Sums with a count below this still fit SQLite's integers."""
_PINNED = 1
"""Value of column `pinned` for a pin without end. A larger value is the pin's end, in seconds since the
epoch; earlier versions take that for not pinned."""
_RELATIVE = StorePaths("")


class Manifest:
    """One open connection. Open with `open`, or use `open_read_only` beside a running server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: str) -> Manifest:
        """Open or create the manifest and bring its schema up to date.

        Raises `ForeignManifest` if its tables are not those that this version can write.
        """
        connection = _connect(path, cached_statements=64)
        try:
            # Nothing here takes long, unless the file was crafted to do harm.
            connection.set_progress_handler(lambda: 1, _OPENING_LIMIT_STEPS)
            database = Database(connection, execute_plugins=False, strict=True)
            check_schema(database, is_complete=False)
            database.enable_wal()
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_LIMIT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_ALLOWANCE_BYTES}")
            # On: a page that becomes free is overwritten too. Not every build of SQLite does so by default.
            connection.execute("PRAGMA secure_delete = ON")
            migrations.apply(database)
            check_schema(database, is_complete=True)
            connection.set_progress_handler(None, 0)
        except BaseException:
            connection.close()
            raise
        return cls(database)

    @classmethod
    def open_read_only(cls, path: str) -> Manifest:
        """Open an existing manifest without changing it; another process may have it open for writing.

        Raises `ForeignManifest` if it contains anything that is not ours.
        """
        connection = _connect(f"file:{urllib.parse.quote(path)}?mode=ro", uri=True)
        database = Database(connection, execute_plugins=False)
        try:
            check_schema(database, is_complete=False)
        except BaseException:
            connection.close()
            raise
        return cls(database)

    def close(self, *, checkpoint: bool = True) -> None:
        """Close the connection; with `checkpoint` first fold the write-ahead log into the database."""
        connection = self._database.conn
        assert connection is not None
        try:
            if checkpoint:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()

    def scrub(self) -> None:
        """Rewrite the database without orphaned contents and without remains of deleted rows in its pages."""
        with self._database.atomic():
            self._connection.execute("DELETE FROM block_contents WHERE hash NOT IN (SELECT hash FROM blocks)")
        self._connection.execute("VACUUM")

    def complaint(self, *, check_pages: bool) -> str:
        """Return what SQLite finds damaged in the database; empty if it is intact.

        Without `check_pages` only the tables with few rows are checked, which are read whole anyway.
        """
        checks = ["quick_check(1)"] * check_pages + [f"integrity_check({table})" for table in _SMALL_TABLES]
        answers = (self._connection.execute(f"PRAGMA {each}").fetchone() for each in checks)
        return next((" ".join(str(answer[0]).split()) for answer in answers if answer != ("ok",)), "")

    @property
    def has_rows(self) -> bool:
        """Whether there is a table for rows; there is none if the first opening was interrupted."""
        return self._database.table("blocks").exists()

    def load(self, *, check_facts: bool = True) -> tuple[list[BlockRecord], list[BlockHash]]:
        """Return all records, least recently used first, and the hashes of rows that are not as written.

        Without `check_facts`, for a manifest known to be as it was left, those are only rows that cannot be
        parsed.
        """
        records, edited = [], []
        # Joined and sorted here: with 100,000 rows SQLite would take half a second longer.
        names = dict(self._connection.execute("SELECT id, fingerprint FROM fingerprints"))
        columns = ", ".join([*_COLUMNS, "row_xxh3"] if check_facts else _COLUMNS)
        with _without_collections():
            for row in self._connection.execute(f"SELECT {columns} FROM blocks ORDER BY rowid"):
                try:
                    record = BlockRecord._make(
                        (
                            *row[:2],
                            names[row[2]],
                            *row[3:13],
                            int(row[13], 16),
                            *row[14:17],
                            _end_time(row[17]),
                        )
                    )
                    is_as_written = not check_facts or row[18] == f"{record.facts_checksum():016x}"
                    # A column may be empty, and the checksum does not cover a block's history.
                    sound = is_as_written and None not in record and record.hit_count < _COUNT_LIMIT
                except (LookupError, ValueError, TypeError, ArithmeticError, struct.error):
                    sound = False
                if sound:
                    records.append(record)
                else:
                    edited.append(BlockHash(row[0]))
        records.sort(key=operator.attrgetter("last_used_time"))
        return records, edited

    def check(self, record: BlockRecord, file: BlockFile) -> None:
        """Raise `BlockFileError` unless a block's row and its bulky contents match its file."""
        row = self._connection.execute(
            "SELECT hash, token_ids, extra, regions FROM block_contents WHERE hash = ?", (file.outline.hash,)
        ).fetchone()
        if not (record.is_of(file) and row == _contents_row(file)):
            raise BlockFileError(BlockDamage.MISMATCH, "its row is not what its file says")

    def insert(
        self, blocks: Iterable[tuple[BlockRecord, BlockFile]], *, day: int = 0, written_bytes: int = 0
    ) -> None:
        """Commit blocks, and count the bytes written on this day, in one transaction.

        The fingerprints must have been added by `add_fingerprint`.
        """
        ids = dict(self._connection.execute("SELECT fingerprint, id FROM fingerprints"))
        rows = [(_row(record, ids), _contents_row(file)) for record, file in blocks]
        with self._database.atomic():
            self._connection.executemany(_INSERT, [row for row, _ in rows])
            self._connection.executemany(
                "INSERT OR REPLACE INTO block_contents (hash, token_ids, extra, regions) VALUES (?, ?, ?, ?)",
                [contents for _, contents in rows],
            )
            if written_bytes:
                self._connection.execute(
                    "INSERT INTO written_days (day, size_bytes) VALUES (?, ?) "
                    "ON CONFLICT (day) DO UPDATE SET size_bytes = min(size_bytes, ?) + excluded.size_bytes",
                    (day, written_bytes, _COUNT_LIMIT),
                )
                self._connection.execute("DELETE FROM written_days WHERE day < ?", (day - 31,))

    def delete(self, hashes: Sequence[BlockHash]) -> None:
        """Delete rows; hashes without a row are ignored."""
        with self._database.atomic():
            for table in ("block_contents", "blocks"):
                self._connection.executemany(
                    f"DELETE FROM {table} WHERE hash = ?", [(name,) for name in hashes]
                )

    def touch(self, uses: Mapping[BlockHash, tuple[float, int]]) -> None:
        """Record the last use (wall clock) and the additional hits of many blocks in one transaction."""
        with self._database.atomic():
            self._connection.executemany(
                "UPDATE blocks SET last_used_time = max(last_used_time, ?), hit_count = hit_count + ? "
                "WHERE hash = ?",
                [(time, hit_count, block_hash) for block_hash, (time, hit_count) in uses.items()],
            )

    def forget_future(self, now_time: float) -> None:
        """Reset all uses later than now (wall clock) to now."""
        with self._database.atomic():
            self._connection.execute(
                "UPDATE blocks SET last_used_time = ? WHERE last_used_time > ?", (now_time, now_time)
            )

    def set_pins(self, end_times: Mapping[BlockHash, float]) -> None:
        """Record until when blocks may not be evicted (wall clock)."""
        with self._database.atomic():
            self._connection.executemany(
                "UPDATE blocks SET pinned = ? WHERE hash = ?",
                [(_pinned(end_time), name) for name, end_time in end_times.items()],
            )

    def add_fingerprint(
        self, fingerprint: Fingerprint, *, details: Mapping[str, str], now_time: float
    ) -> None:
        """Add a fingerprint. Non-empty details replace earlier ones."""
        with self._database.atomic():
            self._connection.execute(
                "INSERT INTO fingerprints (fingerprint, details, created_time) VALUES (?, ?, ?) "
                "ON CONFLICT (fingerprint) DO UPDATE SET details = excluded.details "
                "WHERE excluded.details <> '{}'",
                (fingerprint, json.dumps(dict(details), sort_keys=True), now_time),
            )

    def fingerprints(self) -> dict[Fingerprint, dict[str, str]]:
        """Return all fingerprints with their human-readable details; damaged details are empty."""
        rows = self._connection.execute("SELECT fingerprint, details FROM fingerprints ORDER BY id")
        return {Fingerprint(row[0]): _details(row[1]) for row in rows}

    def set_rates(self, rates: Mapping[Fingerprint, LearnedRates]) -> None:
        """Record models' learned rates; models without a fingerprint here are ignored."""
        with self._database.atomic():
            self._connection.executemany(
                f"INSERT OR REPLACE INTO rates (fingerprint_id, {_RATES}) "
                "SELECT id, ?, ?, ?, ?, ? FROM fingerprints WHERE fingerprint = ?",
                [(*dataclasses.astuple(each), fingerprint) for fingerprint, each in rates.items()],
            )

    def rates(self) -> dict[Fingerprint, LearnedRates]:
        """Return models' learned rates, without implausible rows."""
        rows = self._connection.execute(
            f"SELECT fingerprint, {_RATES} FROM rates JOIN fingerprints ON fingerprint_id = id"
        )
        found = {Fingerprint(row[0]): LearnedRates(*row[1:]) for row in rows}
        return {fingerprint: rates for fingerprint, rates in found.items() if rates.is_plausible}

    def written_days(self) -> dict[int, int]:
        """Return the bytes committed on each of the recent days (days since the epoch, UTC)."""
        return dict(self._connection.execute("SELECT day, size_bytes FROM written_days"))

    @property
    def _connection(self) -> sqlite3.Connection:
        connection = self._database.conn
        assert connection is not None, "The manifest is closed"
        return connection


def _row(record: BlockRecord, fingerprint_ids: Mapping[bytes, int]) -> tuple[object, ...]:
    fingerprint = record.fingerprint
    assert fingerprint in fingerprint_ids, f"Fingerprint {fingerprint.hex()} was never added"
    return (
        *record[:2],
        fingerprint_ids[fingerprint],
        *record[3:13],
        f"{record.header_checksum:016x}",
        *record[14:17],
        _pinned(record.pin_end_time),
        record.depth,
        _RELATIVE.block(fingerprint, record.hash).removeprefix("/"),
        f"{record.facts_checksum():016x}",
    )


def _pinned(end_time: float) -> int:
    """Return the value of column `pinned` for a pin, rounded up to seconds."""
    if end_time in (NOT_PINNED, UNTIL_UNPINNED):
        return _PINNED if end_time else 0
    return max(_PINNED + 1, math.ceil(end_time))


def _end_time(pinned: int | None) -> float:
    """Return when a pin ends (wall clock), from column `pinned`."""
    return UNTIL_UNPINNED if pinned == _PINNED else max(NOT_PINNED, float(pinned or 0))


def _details(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Connection(sqlite3.Connection):
    """A connection that raises `sqlite3.Error` also if SQLite's message is not UTF-8."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        with _decoding_errors():
            return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        with _decoding_errors():
            return super().executemany(sql, parameters)


@contextlib.contextmanager
def _decoding_errors() -> Iterator[None]:
    """Raise the error that Python failed to make because it could not decode SQLite's message."""
    try:
        yield
    except UnicodeDecodeError as undecoded:
        error = sqlite3.DatabaseError(_text(undecoded.object))
        error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_CORRUPT, "SQLITE_CORRUPT"
        raise error from undecoded


def _connect(path: str, *, uri: bool = False, cached_statements: int = 128) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=5.0, uri=uri, cached_statements=cached_statements, factory=_Connection
    )
    # A damaged text makes its value wrong, and is no error of the whole database.
    connection.text_factory = _text
    # The file may come from a stranger, with definitions and pages crafted to do harm.
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_LIMIT_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 64)
    # Only from Python 3.12 on.
    set_config = getattr(connection, "setconfig", None)
    if set_config is not None:
        set_config(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009
    return connection


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _contents_row(file: BlockFile) -> tuple[object, ...]:
    header, regions = file.header, regions_to_json(file.regions, is_public=bool(file.key_id))
    if header is None or file.key_id:
        return file.outline.hash, b"", b"", regions
    return header.hash, pack_tokens(header.token_ids), header.extra, regions


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector while many records are made: it would take a seventh of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
