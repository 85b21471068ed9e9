"""Schema of the manifest, and the check that a database has it: only our own tables and indices are accepted.

SQLite runs what a file contains (triggers, views, computed columns and checks) as soon as a statement touches
it, so that is checked before anything else.
"""

from __future__ import annotations

import dataclasses
import functools

from sqlite_utils import Database, Migrations

from icehouse_server.storage.disk_error import ForeignManifest

migrations = Migrations("icehouse.manifest")
"""A migration is never edited or renamed once released: add one. Its name is stored in the file."""


@migrations()
def create_tables(database: Database) -> None:
    """Create the first schema: small rows for the start, their bulky contents beside them."""
    for statement in _FIRST_TABLES:
        database.execute(statement)


_FIRST_TABLES = (
    """CREATE TABLE fingerprints (id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, details TEXT NOT NULL,
    created_time REAL NOT NULL) STRICT""",
    "CREATE UNIQUE INDEX idx_fingerprints_fingerprint ON fingerprints (fingerprint)",
    """CREATE TABLE blocks (hash BLOB PRIMARY KEY, parent BLOB NOT NULL,
    fingerprint_id INTEGER NOT NULL REFERENCES fingerprints(id), depth INTEGER, start_token_index INTEGER,
    token_count INTEGER, block_token_limit INTEGER, kv_bytes INTEGER, window_bytes INTEGER,
    checkpoint_bytes INTEGER, file TEXT, file_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    inode INTEGER, layout_abi INTEGER, header_xxh3 TEXT, created_time REAL, last_used_time REAL NOT NULL,
    hit_count INTEGER, pinned INTEGER, row_xxh3 TEXT NOT NULL) STRICT""",
    """CREATE TABLE block_contents (hash BLOB PRIMARY KEY, token_ids BLOB NOT NULL, extra BLOB NOT NULL,
    regions TEXT NOT NULL) STRICT""",
    "CREATE TABLE written_days (day INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL) STRICT",
)

_MIGRATIONS_TABLE = "_sqlite_migrations"
"""Of sqlite-utils, whose versions define it differently: its columns are not compared."""

_Column = tuple[str, bool, bool]
"""Type, key, and whether it must be given."""
_Index = tuple[bool, bool, tuple[str | None, ...]]
"""Whether it is unique, whether it is of some rows only, and its columns; None is one that is computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Schema:
    """What a manifest of this version is made of."""

    objects: dict[tuple[str, str, str], int]
    """How many brackets open in the definition, by kind, name and table: computed columns and checks stand in
    brackets, or are as short as a comparison."""
    columns: dict[str, dict[str, _Column]]
    indices: dict[str, dict[str, _Index]]


def check_objects(database: Database) -> None:
    """Raise `ForeignManifest` for a database in which there is anything but tables and indices of ours.

    Reads only its list of contents, and so runs nothing of it.
    """
    ours = _own_schema()
    tables = set()
    for kind, name, table, page, definition in database.execute(
        "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master"
    ):
        if definition is None and kind == "index":
            continue  # SQLite's own, of a key
        bracket_count = ours.objects.get((kind, name, table))
        # A table without a page is virtual.
        if bracket_count is None or not page or definition.count("(") > bracket_count:
            raise ForeignManifest(f"The {kind} {str(name)[:64]!r} is not of this version")
        tables.add(table)
    for table, indices in ours.indices.items():
        found = _indices(database, table) if table in tables else {}
        wrong = [name for name, index in found.items() if indices.get(name, index) != index]
        if wrong:
            raise ForeignManifest(f"Table {table} is not of this version: indices {', '.join(wrong)}")


def check_schema(database: Database) -> None:
    """Raise `ForeignManifest` unless each column and index of ours is there as we made it, and no other
    column is required."""
    ours = _own_schema()
    for table, columns in ours.columns.items():
        found = _columns(database, table)
        wrong = [name for name, column in columns.items() if found.get(name) != column]
        wrong += [name for name, column in found.items() if name not in columns and column[2]]
        wrong += ours.indices[table].keys() - _indices(database, table).keys()
        if wrong:
            raise ForeignManifest(f"Table {table} is not of this version: {', '.join(wrong)}")


@functools.cache
def _own_schema() -> _Schema:
    database = Database(memory=True, execute_plugins=False, strict=True)
    try:
        migrations.apply(database)
        objects = {
            (kind, name, table): definition.count("(")
            for kind, name, table, definition in database.execute(
                "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL"
            )
        }
        # Older versions of sqlite-utils write its key separately.
        objects["table", _MIGRATIONS_TABLE, _MIGRATIONS_TABLE] = 2
        tables = [name for kind, name, _ in objects if kind == "table" and name != _MIGRATIONS_TABLE]
        return _Schema(
            objects,
            {table: _columns(database, table) for table in tables},
            {table: _indices(database, table) for table in tables},
        )
    finally:
        database.close()


def _columns(database: Database, table: str) -> dict[str, _Column]:
    return {
        name: (kind, bool(key), bool(is_required) and default is None and not key)
        for _, name, kind, is_required, default, key in database.execute(f"PRAGMA table_info({table})")
    }


def _indices(database: Database, table: str) -> dict[str, _Index]:
    """Return the indices of a table that were created by name."""
    made = database.execute(f"PRAGMA index_list({table})").fetchall()
    return {
        name: (
            bool(is_unique),
            bool(is_partial),
            tuple(row[2] for row in database.execute("SELECT * FROM pragma_index_info(?)", (name,))),
        )
        for _, name, is_unique, origin, is_partial in made
        if origin == "c"
    }
