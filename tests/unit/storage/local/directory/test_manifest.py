"""The manifest: rows come back as they were written, strictly typed, and edits are seen."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sqlite3
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.local.block_format.file_region import FileRegion
from icehouse_server.storage.local.block_format.header import (
    BlockFile,
    BlockFileError,
    BlockOutline,
)
from icehouse_server.storage.local.directory.manifest import BlockRecord, Manifest, record_of

from tests.fixtures.storage.blocks import FINGERPRINT, OTHER_FINGERPRINT, RATES, make_block


def described(seed: int = 1, **how) -> tuple[BlockRecord, BlockFile]:
    """Return a row and the file it could be of, without any file."""
    header = make_block(seed=seed, **how).header
    region = FileRegion(RegionKind.KV, 100, 200, 2**64 - 1, ())
    file = BlockFile(BlockOutline.of(header), header, (region,), 300, 2**64 - 2)
    return record_of(file, mtime_ns=seed, inode=seed, used_time=float(seed)), file


@pytest.fixture
def manifest(tmp_path):
    opened = Manifest.open(str(tmp_path / "manifest.sqlite3"))
    opened.add_fingerprint(FINGERPRINT, details={"model": "a"}, now_time=1.0)
    yield opened
    opened.close()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_record_comes_back(data, tmp_path_factory):
    count = st.integers(0, 2**62)
    time = st.floats(0, 1e12)
    own, file = described()
    written = record_of(file, mtime_ns=data.draw(count), inode=data.draw(count), used_time=data.draw(time))
    record = written._replace(
        kv_bytes=data.draw(count),
        file_bytes=data.draw(count),
        start_token_index=data.draw(count),
        header_checksum=data.draw(st.integers(0, 2**64 - 1)),
        last_used_time=data.draw(time),
        hit_count=data.draw(st.integers(0, 2**62 - 1)),
        pin_end_time=data.draw(st.sampled_from((NOT_PINNED, 2.0, 1e9, UNTIL_UNPINNED))),
    )
    path = str(tmp_path_factory.mktemp("manifest") / "m")
    manifest = Manifest.open(path)
    manifest.add_fingerprint(FINGERPRINT, details={}, now_time=1.0)
    manifest.insert([(record, file)], day=1, written_bytes=5)
    manifest.close()
    again = Manifest.open(path)
    assert again.load() == ([record], [])
    again.check(own, file)
    again.close()


def test_rows_come_least_recently_used_first(manifest):
    pairs = [described(seed) for seed in (3, 1, 2)]
    manifest.insert(pairs, day=1, written_bytes=0)
    assert [record.last_used_time for record in manifest.load()[0]] == [1.0, 2.0, 3.0]
    first = pairs[1][0].hash
    manifest.touch({first: (9.0, 4)})
    last = manifest.load()[0][-1]
    assert (last.hash, last.last_used_time, last.hit_count) == (first, 9.0, 4)


def test_recency_never_goes_back(manifest):
    record, file = described(5)
    manifest.insert([(record, file)], day=1, written_bytes=0)
    manifest.touch({record.hash: (1.0, 1)})
    assert manifest.load()[0][0].last_used_time == 5.0


def test_delete_takes_contents_too_and_ignores_strangers(manifest):
    pairs = [described(seed) for seed in range(1, 1203)]
    manifest.insert(pairs, day=1, written_bytes=0)
    manifest.delete([record.hash for record, _ in pairs[1:]] + [b"\0" * 32])
    assert [record.hash for record in manifest.load()[0]] == [pairs[0][0].hash]
    manifest.check(*pairs[0])
    with pytest.raises(BlockFileError, match="its row is not what its file says"):
        manifest.check(*pairs[1])


def test_the_day_s_bytes_add_up(manifest):
    for seed, day in ((1, 10), (2, 10), (3, 11)):
        manifest.insert([described(seed)], day=day, written_bytes=100)
    assert manifest.written_days() == {10: 200, 11: 100}


def test_fingerprints_keep_their_details(manifest):
    manifest.add_fingerprint(FINGERPRINT, details={}, now_time=2.0)
    manifest.add_fingerprint(OTHER_FINGERPRINT, details={"model": "b"}, now_time=2.0)
    assert manifest.fingerprints() == {FINGERPRINT: {"model": "a"}, OTHER_FINGERPRINT: {"model": "b"}}


@pytest.mark.parametrize(
    "details", ["'{'", "'[]'", "CAST(x'80' AS TEXT)", f"'{'[' * 100_000}'"], ids=range(4)
)
def test_damaged_details_are_none(manifest, tmp_path, details):
    other = sqlite3.connect(tmp_path / "manifest.sqlite3")
    other.execute(f"UPDATE fingerprints SET details = {details}")
    other.commit()
    other.close()
    assert manifest.fingerprints() == {FINGERPRINT: {}}


def test_rates_come_back_the_latest_of_each_model(manifest):
    manifest.add_fingerprint(OTHER_FINGERPRINT, details={}, now_time=2.0)
    other = dataclasses.replace(RATES, measured_on="elsewhere")
    manifest.set_rates({FINGERPRINT: other, OTHER_FINGERPRINT: other})
    manifest.set_rates({FINGERPRINT: RATES, Fingerprint(b"?" * 32): RATES})
    assert manifest.rates() == {FINGERPRINT: RATES, OTHER_FINGERPRINT: other}


@pytest.mark.parametrize("column", ["read_bytes_per_s", "adopt_tokens_per_s", "prefill_tokens_per_s"])
@pytest.mark.parametrize("lie", ["0", "-1", "-1e9", "1e-300", "1e300", "9e999", "-9e999"])
def test_a_rate_that_nobody_can_have_measured_is_none(manifest, tmp_path, column, lie):
    edit_rates(manifest, tmp_path, f"{column} = {lie}")
    assert manifest.rates() == {}


@pytest.mark.parametrize("lie", ["-1", str(2**62), str(-(2**62))])
def test_a_count_that_nobody_can_have_counted_is_none(manifest, tmp_path, lie):
    edit_rates(manifest, tmp_path, f"untried_count = {lie}")
    assert manifest.rates() == {}


@pytest.mark.parametrize("value", ["'fast'", "x'00ff'", "NULL"])
@pytest.mark.parametrize(
    "column", ["read_bytes_per_s", "adopt_tokens_per_s", "prefill_tokens_per_s", "untried_count"]
)
def test_rates_of_other_types_are_none(manifest, tmp_path, column, value):
    """SQLite lets none into the table, but a file may come from anywhere."""
    manifest.set_rates({FINGERPRINT: RATES})
    path = tmp_path / "manifest.sqlite3"
    (strict,) = fetch(path, "SELECT sql FROM sqlite_master WHERE name = 'rates'")
    loose = re.sub(r"REAL|INTEGER(?! PRIMARY)|NOT NULL|STRICT", "", strict)
    for definition, statement in ((loose, f"UPDATE rates SET {column} = {value}"), (strict, "")):
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA writable_schema = ON")
            other.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'rates'", (definition,))
            other.commit()
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute(statement)
            other.commit()
    with contextlib.closing(Manifest.open(str(path))) as again:
        assert again.rates() == {}
    assert fetch(path, f"SELECT typeof({column}) FROM rates") != ("real",)


def fetch(path, statement):
    with contextlib.closing(sqlite3.connect(path)) as other:
        return other.execute(statement).fetchone()


def edit_rates(manifest, tmp_path, change):
    manifest.set_rates({FINGERPRINT: RATES})
    other = sqlite3.connect(tmp_path / "manifest.sqlite3")
    other.execute(f"UPDATE rates SET {change}")
    other.commit()
    other.close()


def test_an_unnamed_fingerprint_is_a_broken_invariant(manifest):
    pair = described(fingerprint=OTHER_FINGERPRINT)
    with pytest.raises(AssertionError):
        manifest.insert([pair], day=1, written_bytes=0)
    assert manifest.load() == ([], [])


def test_tables_are_strict_and_the_log_is_ahead(manifest, tmp_path):
    record, file = described()
    manifest.insert([(record, file)], day=1, written_bytes=0)
    assert os.path.exists(tmp_path / "manifest.sqlite3-wal")
    other = sqlite3.connect(tmp_path / "manifest.sqlite3")
    with pytest.raises(sqlite3.IntegrityError):
        other.execute("UPDATE blocks SET file_bytes = 'many'")
    other.close()


@pytest.mark.parametrize(
    "change",
    [
        "file_bytes = 1",
        "fingerprint_id = 77",
        "parent = x'00'",
        "row_xxh3 = 'no'",
        "row_xxh3 = CAST(x'6180' AS TEXT)",
        "header_xxh3 = CAST(x'6180' AS TEXT)",
    ],
)
def test_an_edited_row_is_told_apart(manifest, tmp_path, change):
    pairs = [described(seed) for seed in (1, 2)]
    manifest.insert(pairs, day=1, written_bytes=0)
    other = sqlite3.connect(tmp_path / "manifest.sqlite3")
    other.execute(f"UPDATE blocks SET {change} WHERE hash = ?", (pairs[0][0].hash,))
    other.commit()
    other.close()
    assert manifest.load() == ([pairs[1][0]], [pairs[0][0].hash])


def test_a_reader_sees_rows_while_a_writer_is_open(manifest, tmp_path):
    record, file = described()
    manifest.insert([(record, file)], day=1, written_bytes=0)
    reader = Manifest.open_read_only(str(tmp_path / "manifest.sqlite3"))
    assert reader.load() == ([record], [])
    with pytest.raises(sqlite3.OperationalError):
        reader.delete([record.hash])
    reader.close(checkpoint=False)


def test_another_thread_is_refused(manifest):
    caught = []

    def use() -> None:
        try:
            manifest.load()
        except sqlite3.ProgrammingError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_what_is_deleted_is_overwritten_whatever_the_build_does_by_itself(tmp_path):
    manifest = Manifest.open(str(tmp_path / "manifest.sqlite3"))
    assert manifest._database.conn.execute("PRAGMA secure_delete").fetchone() == (1,)
    manifest.close()
