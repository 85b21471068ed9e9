"""Schema of the manifest, and the check that a database has it: only our own tables and indices are accepted,
each exactly as created here. Any other manifest is rebuilt from the files.

SQLite runs what a file contains (triggers, views, computed columns and checks) as soon as a statement touches
it, so this check comes before anything else.
"""

from __future__ import annotations

import functools

from sqlite_utils import Database, Migrations

from icehouse_server.storage.disk_error import ForeignManifest, LaterManifest

migrations = Migrations("icehouse.manifest")
"""A migration is never edited or renamed once released: add another. Its name is stored in the file."""


@migrations()
def create_tables(database: Database) -> None:
    """Create the first schema: small rows for the start, their bulky contents in another table."""
    for statement in _FIRST_TABLES:
        database.execute(statement)


@migrations()
def create_rates(database: Database) -> None:
    """Create a table for the rates that engines learned."""
    database.execute(
        """CREATE TABLE rates (fingerprint_id INTEGER PRIMARY KEY REFERENCES fingerprints(id),
        measured_on TEXT NOT NULL, read_bytes_per_s REAL NOT NULL, adopt_tokens_per_s REAL NOT NULL,
        prefill_tokens_per_s REAL NOT NULL, untried_count INTEGER NOT NULL) STRICT"""
    )


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
"""The table of sqlite-utils, whose versions define it and its index differently."""
_MIGRATIONS_LIMIT = 1000
_MIGRATIONS_BRACKETS = {"table": 2, "index": 1}
"""Most brackets in their definitions: anything computed needs more."""


def check_schema(database: Database, *, is_complete: bool) -> None:
    """Raise `ForeignManifest` if a database contains anything but our tables and indices, or, with
    `is_complete`, not all of them.

    Raises `LaterManifest` if a later version made it so. Reads only its list of contents and, if nothing
    can be computed there, its list of migrations, so nothing in it runs.
    """
    missing = dict(_own_definitions())
    unknown, tells_migrations = "", False
    for kind, name, table, page, definition in database.execute(
        "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master"
    ):
        if definition is None and kind == "index":
            continue  # SQLite's own, for a key
        if table == _MIGRATIONS_TABLE:
            # A table without a page is virtual.
            is_ours = bool(page) and definition.count("(") <= _MIGRATIONS_BRACKETS.get(kind, 0)
            tells_migrations |= is_ours and kind == "table"
        else:
            is_ours = missing.pop((kind, name), None) == _plain(definition)
        if not is_ours:
            unknown = unknown or f"The {kind} {str(name)[:64]!r} is not of this version"
    if is_complete and missing:
        unknown = unknown or f"There is no {', '.join(f'{kind} {name}' for kind, name in missing)}"
    if unknown:
        later = _later_migration(database) if tells_migrations else None
        raise (
            ForeignManifest(unknown)
            if later is None
            else LaterManifest(
                f"It was written by a later version of Icehouse, which knows the migration {later!r}"
            )
        )


def _later_migration(database: Database) -> str | None:
    """Return the first migration that this version does not know."""
    own = {migration.name for migration in migrations.pending(Database(memory=True, execute_plugins=False))}
    names = database.execute(
        f"SELECT name FROM {_MIGRATIONS_TABLE} WHERE migration_set = ? LIMIT ?",
        (migrations.name, _MIGRATIONS_LIMIT),
    )
    return next((str(name)[:64] for (name,) in names if name not in own), None)


@functools.cache
def _own_definitions() -> dict[tuple[str, str], str]:
    """Return the definition of each of our tables and indices."""
    database = Database(memory=True, execute_plugins=False, strict=True)
    try:
        migrations.apply(database)
        found = database.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND tbl_name != ?",
            (_MIGRATIONS_TABLE,),
        )
        return {(kind, name): _plain(definition) for kind, name, definition in found}
    finally:
        database.close()


def _plain(definition: str) -> str:
    """Return a definition without white space and quotes around names."""
    return "".join(definition.replace('"', "").split())
