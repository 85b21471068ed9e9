"""Migrations of the manifest, step by step. One is never edited once released: add one."""

from __future__ import annotations

from sqlite_utils import Database, Migrations
from sqlite_utils.db import Table

migrations = Migrations("icehouse.manifest")


@migrations()
def create_tables(database: Database) -> None:
    """Create the first schema: small rows for the start, their bulky contents beside them."""
    fingerprints = database["fingerprints"]
    blocks = database["blocks"]
    contents = database["block_contents"]
    written = database["written_days"]
    assert isinstance(fingerprints, Table) and isinstance(blocks, Table)
    assert isinstance(contents, Table) and isinstance(written, Table)
    fingerprints.create(
        {"id": int, "fingerprint": bytes, "details": str, "created_time": float},
        pk="id",
        not_null={"fingerprint", "details", "created_time"},
        strict=True,
    )
    fingerprints.create_index(["fingerprint"], unique=True)
    blocks.create(
        {
            "hash": bytes,
            "parent": bytes,
            "fingerprint_id": int,
            "depth": int,
            "start_token_index": int,
            "token_count": int,
            "block_token_limit": int,
            "kv_bytes": int,
            "window_bytes": int,
            "checkpoint_bytes": int,
            "file": str,
            "file_bytes": int,
            "mtime_ns": int,
            "inode": int,
            "layout_abi": int,
            "header_xxh3": str,
            "created_time": float,
            "last_used_time": float,
            "hit_count": int,
            "pinned": int,
            "row_xxh3": str,
        },
        pk="hash",
        not_null={"parent", "fingerprint_id", "file_bytes", "mtime_ns", "last_used_time", "row_xxh3"},
        foreign_keys=[("fingerprint_id", "fingerprints", "id")],
        strict=True,
    )
    contents.create(
        {"hash": bytes, "token_ids": bytes, "extra": bytes, "regions": str},
        pk="hash",
        not_null={"token_ids", "extra", "regions"},
        strict=True,
    )
    written.create({"day": int, "size_bytes": int}, pk="day", not_null={"size_bytes"}, strict=True)
