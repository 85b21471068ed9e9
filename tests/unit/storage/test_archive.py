"""Archive: what is written is read again, and nothing that was altered is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import xxhash
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage import archive
from icehouse_server.storage.archive import (
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    ArchiveWriter,
    BlockEnd,
    BlockEntry,
    Item,
    Trailer,
    reachable,
)

HEADER = ArchiveHeader(Fingerprint(b"\x11" * 32), 16, {"architecture": "test"})
FILES = (b"the first block" * 5, b"the second", b"a tail")


def name(number: int) -> BlockHash:
    return BlockHash(bytes((number,)) * 32)


def entry(number: int, *, start: int | None = None, parent: int | None = None, size: int = 0) -> BlockEntry:
    return BlockEntry(
        name(number),
        name(number - 1 if parent is None else parent),
        (number - 1) * 16 if start is None else start,
        16,
        size or len(FILES[(number - 1) % 3]),
        b"",
    )


def chunks(entries: list[BlockEntry] | None = None, *, header: ArchiveHeader = HEADER) -> list[bytes]:
    """Return an archive, a record or a block's file at a time."""
    writer = ArchiveWriter()
    parts = [writer.begin(header)]
    for number, each in enumerate(entries or [entry(1), entry(2), entry(3)]):
        parts.append(writer.block(each))
        data = FILES[number % 3]
        writer.part(data)
        parts += [data, writer.end_block()]
    return [*parts, writer.end()]


def read(data: bytes, *, size: int = 1 << 20, **limits: int) -> tuple[list[Item], str]:
    """Return what is read of an archive in pieces of this size, and what stopped it."""
    reader, items = ArchiveReader(**limits), list[Item]()
    try:
        for start in range(0, len(data), size):
            for item in reader.feed(data[start : start + size]):
                items.append(item)
        reader.finish()
    except ArchiveError as error:
        return items, str(error)
    return items, ""


def whole_blocks(items: list[Item]) -> int:
    return sum(isinstance(item, BlockEnd) for item in items)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_is_written_is_read_in_pieces_of_any_size(size: int) -> None:
    items, stopped = read(b"".join(chunks()), size=size)
    assert (items[0], items[-1], stopped) == (HEADER, Trailer(3), "")
    assert [item for item in items if isinstance(item, BlockEntry)] == [entry(1), entry(2), entry(3)]
    assert b"".join(item for item in items if isinstance(item, bytes)) == b"".join(FILES)


def test_no_altered_byte_is_overlooked_and_the_blocks_before_it_count() -> None:
    parts = chunks()
    data = b"".join(parts)
    ends = [sum(map(len, parts[: 1 + 3 * count])) for count in range(1, 4)]
    for position in range(len(data)):
        flipped = data[:position] + bytes((data[position] ^ 1,)) + data[position + 1 :]
        items, stopped = read(flipped)
        assert stopped, position
        assert whole_blocks(items) == sum(end <= position for end in ends), position


def test_an_archive_that_ends_early_says_so_at_every_byte() -> None:
    parts = chunks()
    data = b"".join(parts)
    ends = [sum(map(len, parts[: 1 + 3 * count])) for count in range(1, 4)]
    for length in range(len(data)):
        items, stopped = read(data[:length])
        assert "ends too early" in stopped
        assert whole_blocks(items) == sum(end <= length for end in ends)
    assert "more data after its end" in read(data + b"x")[1]


def record(kind: bytes, fields: object) -> bytes:
    text = json.dumps(fields).encode()
    body = kind + len(text).to_bytes(4, "little") + text
    return body + xxhash.xxh3_64_digest(body)


def altered(number: int, **changes: object) -> bytes:
    """Return an archive with other fields in one record, and a right checksum."""
    parts = chunks()
    start = len(archive.MAGIC) if number == 0 else 0
    fields = json.loads(parts[number][start + 5 : -8])
    kind = parts[number][start : start + 1]
    parts[number] = parts[number][:start] + record(kind, {**fields, **changes})
    return b"".join(parts)


@pytest.mark.parametrize(
    "number, changes",
    [
        (0, {"version": 2}),
        (0, {"digest": "crc32"}),
        (0, {"fingerprint": "../../etc/passwd"}),
        (0, {"fingerprint": "11"}),
        (0, {"block_token_limit": 0}),
        (0, {"block_token_limit": True}),
        (0, {"details": {"a": 1}}),
        (0, {"details": []}),
        (1, {"hash": "../../../etc/cron.d/x"}),
        (1, {"hash": None}),
        (1, {"hash": "11" * 31}),
        (1, {"parent": "/"}),
        (1, {"file_bytes": 1 << 63}),
        (1, {"file_bytes": -1}),
        (1, {"file_bytes": 0}),
        (1, {"file_bytes": 1e3}),
        (1, {"token_count": 17}),
        (1, {"start_token_index": -16}),
        (1, {"start_token_index": 1 << 80}),
        (1, {"start_token_index": 16}),
        (4, {"parent": (b"\x09" * 32).hex()}),
        (4, {"start_token_index": 32}),
        (4, {"hash": (b"\x01" * 32).hex()}),
        (4, {"adapter": "x"}),
        (3, {"sha256": "0" * 64}),
        (10, {"block_count": 2}),
    ],
)
def test_a_hostile_record_ends_the_archive_before_it(number: int, changes: dict[str, object]) -> None:
    items, stopped = read(altered(number, **changes))
    assert stopped
    assert whole_blocks(items) == max(0, (number - 1) // 3)


def test_a_record_that_claims_to_be_huge_is_refused_at_once() -> None:
    reader = ArchiveReader()
    with pytest.raises(ArchiveError, match="such a record cannot be"):
        list(reader.feed(archive.MAGIC + b"H" + b"\xff" * 4))
    deep = b"H" + (100_000).to_bytes(4, "little") + b"[" * 100_000
    assert "cannot be used" in read(archive.MAGIC + deep + xxhash.xxh3_64_digest(deep))[1]


def test_a_block_larger_than_the_reader_takes_is_refused_before_its_bytes() -> None:
    items, stopped = read(b"".join(chunks()), block_limit_bytes=20)
    assert whole_blocks(items) == 0 and "75 is not a number from 1 to 20" in stopped


def test_records_out_of_order_are_refused() -> None:
    header, block, _, end, *_ = chunks()
    orders: dict[str, Callable[[], bytes]] = {
        "two headers": lambda: header + header[len(archive.MAGIC) :],
        "a block first": lambda: archive.MAGIC + block,
        "an end without a block": lambda: header + end,
    }
    for order in orders.values():
        assert "such a record cannot be" in read(order())[1]


def test_parents_come_first_and_orphans_are_left_out() -> None:
    lonely = entry(9, parent=8, start=64)
    ordered, left_out = reachable([entry(3), lonely, entry(1), entry(2)])
    assert (ordered, left_out) == ([entry(1), entry(2), entry(3)], 1)
