"""What the disk and SQLite refuse, told apart by what helps."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from icehouse_server.storage.disk_error import DiskErrorKind, ForeignManifest, classify

FULL, FOREIGN, DAMAGED, REFUSED = (
    DiskErrorKind.FULL,
    DiskErrorKind.FOREIGN,
    DiskErrorKind.DAMAGED,
    DiskErrorKind.REFUSED,
)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, FULL),
        (errno.EDQUOT, FULL),
        (errno.EIO, REFUSED),
        (errno.EROFS, REFUSED),
        (errno.EACCES, REFUSED),
    ],
)
def test_errors_of_the_system(number: int, kind: DiskErrorKind) -> None:
    assert classify(OSError(number, "")) is kind


def raised(connection: sqlite3.Connection, statement: str) -> sqlite3.Error:
    with pytest.raises(sqlite3.Error) as caught:
        connection.execute(statement)
    return caught.value


def test_errors_that_sqlite_really_raises(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a")
    connection.execute("CREATE TABLE t (x BLOB)")
    assert classify(raised(connection, "SELECT x FROM missing")) is FOREIGN
    assert classify(raised(connection, "INSERT INTO t VALUES (1, 2)")) is FOREIGN
    connection.execute("PRAGMA max_page_count = 3")
    assert classify(raised(connection, "INSERT INTO t VALUES (zeroblob(100000))")) is FULL
    (tmp_path / "b").write_bytes(b"no database" * 1000)
    assert classify(raised(sqlite3.connect(tmp_path / "b"), "SELECT * FROM sqlite_master")) is DAMAGED
    other = sqlite3.connect(tmp_path / "a", timeout=0)
    connection.execute("BEGIN EXCLUSIVE")
    assert classify(raised(other, "SELECT * FROM t")) is REFUSED


def test_an_error_that_names_no_code_is_the_disks() -> None:
    assert classify(sqlite3.OperationalError("disk I/O error")) is REFUSED
    assert classify(ForeignManifest("")) is FOREIGN
