"""Archive: blocks of one model as one stream of bytes, written and read piece by piece.

A stream is a magic number followed by records. A record is its kind (1 byte), the length of its text (4
bytes, little endian), the text (JSON), and the xxh3 of all that (8 bytes). The first record is the header.
Each block is a record that names it, the bytes of its block file, and a record with their SHA-256. A parent
comes before its children. The trailer has the count of blocks and the SHA-256 of everything before it. Token
ids are only in the block files; a block's name proves them.

Nothing that is read is trusted: lengths are bounded before anything is stored, names are hexadecimal digits
and never paths, and a block counts only once its checksum was seen. The adopter of a block verifies its file
as well. Any thread may use these classes, one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from icehouse_server.domain.ids import BlockHash, Fingerprint

MAGIC = b"ICEARCH\n"
FORMAT_VERSION = 1
DIGEST_NAME = "sha256"
RECORD_LIMIT_BYTES = 1 << 20
"""Most bytes of a record's text; a header names the digests of a few hundred modules of code."""
BLOCK_LIMIT_BYTES = 4 << 30
"""Most bytes of a block file in an archive."""
BLOCK_LIMIT_COUNT = 1 << 20
"""Most blocks of one archive: the reader remembers their names."""
TOKEN_LIMIT = 1 << 40
"""More than any prompt has."""
_CHECKSUM_BYTES = 8
_PREFIX_BYTES = 5
_NAME_BYTES = 32


class _Kind(enum.IntEnum):
    HEADER = ord("H")
    BLOCK = ord("B")
    BLOCK_END = ord("E")
    TRAILER = ord("T")


class ArchiveError(Exception):
    """The stream is no archive, was altered, or ends too early. What was read before it remains valid."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArchiveHeader:
    """What all blocks of an archive have in common."""

    fingerprint: Fingerprint
    block_token_limit: int
    """Tokens of a full block."""
    details: Mapping[str, str]
    """What the fingerprint was computed from, for people to read."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockEntry:
    """One block of an archive, before the bytes of its file."""

    hash: BlockHash
    parent: BlockHash
    start_token_index: int
    token_count: int
    file_bytes: int
    adapter: bytes | None = None
    """Digest of the LoRA adapter it was computed with, empty for the bare model; None if the archive was made
    from a directory, which does not record it."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockEnd:
    """The bytes of the last block entry were complete and as written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trailer:
    """The archive is complete."""

    block_count: int


Item = ArchiveHeader | BlockEntry | bytes | BlockEnd | Trailer
"""What a reader yields: a block's file comes as any number of `bytes` between its entry and `BlockEnd`."""


class ArchiveWriter:
    """Makes an archive's bytes: `begin`, for each block `block`, `part`s and `end_block`, then `end`."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._file = hashlib.sha256()
        self._block_count = 0

    def begin(self, header: ArchiveHeader) -> bytes:
        """Return the magic number and the header."""
        fields = {
            "version": FORMAT_VERSION,
            "fingerprint": header.fingerprint.hex(),
            "block_token_limit": header.block_token_limit,
            "digest": DIGEST_NAME,
            "details": dict(header.details),
        }
        return self._noted(MAGIC + _record(_Kind.HEADER, fields))

    def block(self, entry: BlockEntry) -> bytes:
        """Return the record that precedes a block's file."""
        self._block_count += 1
        self._file = hashlib.sha256()
        fields: dict[str, object] = {
            "hash": entry.hash.hex(),
            "parent": entry.parent.hex(),
            "start_token_index": entry.start_token_index,
            "token_count": entry.token_count,
            "file_bytes": entry.file_bytes,
        }
        if entry.adapter is not None:
            fields["adapter"] = entry.adapter.hex()
        return self._noted(_record(_Kind.BLOCK, fields))

    def part(self, data: bytes | memoryview) -> None:
        """Note a part of a block's file; the caller puts it into the stream unchanged."""
        self._file.update(data)
        self._whole.update(data)

    def end_block(self) -> bytes:
        """Return the record that follows a block's file."""
        return self._noted(_record(_Kind.BLOCK_END, {DIGEST_NAME: self._file.hexdigest()}))

    def end(self) -> bytes:
        fields = {"block_count": self._block_count, DIGEST_NAME: self._whole.hexdigest()}
        return _record(_Kind.TRAILER, fields)

    def _noted(self, data: bytes) -> bytes:
        self._whole.update(data)
        return data


class ArchiveReader:
    """Reads an archive that arrives in pieces of any size. It holds one record and the blocks' names."""

    def __init__(self, *, block_limit_bytes: int = BLOCK_LIMIT_BYTES) -> None:
        """No block file may have more than `block_limit_bytes`."""
        self._block_limit_bytes = block_limit_bytes
        self._buffer = bytearray()
        self._position = 0
        self._whole = hashlib.sha256()
        self._file = hashlib.sha256()
        self._left_bytes = 0
        """Bytes still missing of the current block file."""
        self._expected: tuple[_Kind, ...] = ()
        """Which records may come next; none before the magic number, and none after the trailer."""
        self._has_begun = False
        self._header: ArchiveHeader | None = None
        self._ends: dict[BlockHash, int] = {}
        """Where each block so far ends, in tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether the trailer was read."""
        return self._has_begun and not self._expected

    def feed(self, data: bytes | memoryview) -> Iterator[Item]:
        """Yield the items that these further bytes complete. Raises `ArchiveError`."""
        self._buffer += data
        while (item := self._next()) is not None:
            yield item

    def finish(self) -> None:
        """Raise `ArchiveError` unless the archive is complete."""
        if not self.is_complete:
            raise ArchiveError(f"it ends too early: after {self._position + len(self._buffer)} bytes")

    def _next(self) -> Item | None:
        if not self._has_begun:
            if len(self._buffer) < len(MAGIC):
                return None
            if self._take(len(MAGIC)) != MAGIC:
                raise ArchiveError("it does not begin like an Icehouse archive")
            self._has_begun, self._expected = True, (_Kind.HEADER,)
        if self._left_bytes:
            part = self._take(min(self._left_bytes, len(self._buffer)))
            self._file.update(part)
            self._left_bytes -= len(part)
            return part or None
        if self.is_complete:
            if self._buffer:
                raise ArchiveError(f"there is more data after its end at byte {self._position}")
            return None
        return self._next_record()

    def _next_record(self) -> Item | None:
        if len(self._buffer) < _PREFIX_BYTES:
            return None
        position, kind = self._position, self._buffer[0]
        length = int.from_bytes(self._buffer[1:_PREFIX_BYTES], "little")
        if kind not in self._expected or length > RECORD_LIMIT_BYTES:
            raise ArchiveError(f"it was altered: such a record cannot be at byte {position}")
        size_bytes = _PREFIX_BYTES + length + _CHECKSUM_BYTES
        if len(self._buffer) < size_bytes:
            return None
        whole = self._whole.hexdigest()
        record = self._take(size_bytes)
        body, checksum = record[:-_CHECKSUM_BYTES], record[-_CHECKSUM_BYTES:]
        if xxhash.xxh3_64_digest(body) != checksum:
            raise ArchiveError(f"it was altered: the checksum of the record at byte {position} is wrong")
        with _parsing_errors(position):
            fields = json.loads(body[_PREFIX_BYTES:])
            return self._read(_Kind(kind), fields, whole=whole)

    def _read(self, kind: _Kind, fields: Mapping[str, object], *, whole: str) -> Item:
        if kind is _Kind.HEADER:
            self._header = _header_of(fields)
            self._expected = (_Kind.BLOCK, _Kind.TRAILER)
            return self._header
        if kind is _Kind.BLOCK:
            entry = self._entry_of(fields)
            self._file, self._left_bytes = hashlib.sha256(), entry.file_bytes
            self._ends[entry.hash] = entry.start_token_index + entry.token_count
            self._expected = (_Kind.BLOCK_END,)
            return entry
        if kind is _Kind.BLOCK_END:
            if fields[DIGEST_NAME] != self._file.hexdigest():
                raise ValueError("the checksum of the block before it is wrong")
            self._expected = (_Kind.BLOCK, _Kind.TRAILER)
            return BlockEnd()
        if (fields[DIGEST_NAME], fields["block_count"]) != (whole, len(self._ends)):
            raise ValueError("its total checksum or number of blocks is wrong")
        self._expected = ()
        return Trailer(len(self._ends))

    def _entry_of(self, fields: Mapping[str, object]) -> BlockEntry:
        """Return a block's entry. Raises ValueError if no block can be like this, or not at this place."""
        assert self._header is not None
        adapter = fields.get("adapter")
        entry = BlockEntry(
            hash=BlockHash(_name(fields["hash"])),
            parent=BlockHash(_name(fields["parent"])),
            start_token_index=_number(fields["start_token_index"], most=TOKEN_LIMIT),
            token_count=_number(fields["token_count"], least=1, most=self._header.block_token_limit),
            file_bytes=_number(fields["file_bytes"], least=1, most=self._block_limit_bytes),
            adapter=None if adapter is None else _name(adapter, may_be_empty=True),
        )
        if entry.hash in self._ends:
            raise ValueError("the block occurs twice")
        if len(self._ends) >= BLOCK_LIMIT_COUNT:
            raise ValueError(f"there are more than {BLOCK_LIMIT_COUNT} blocks")
        if entry.start_token_index and self._ends.get(entry.parent) != entry.start_token_index:
            raise ValueError("the preceding block of its prompt does not come before it")
        return entry

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(self._buffer[:size_bytes])
        del self._buffer[:size_bytes]
        self._whole.update(taken)
        self._position += size_bytes
        return taken


def reachable(entries: Sequence[BlockEntry]) -> tuple[list[BlockEntry], int]:
    """Return the blocks in an order that an archive may have, parents first, and how many cannot be reached
    from the beginning of their prompt."""
    ends: dict[BlockHash, int] = {}
    ordered = []
    for entry in sorted(entries, key=lambda entry: entry.start_token_index):
        if entry.start_token_index == 0 or ends.get(entry.parent) == entry.start_token_index:
            ends[entry.hash] = entry.start_token_index + entry.token_count
            ordered.append(entry)
    return ordered, len(entries) - len(ordered)


def _record(kind: _Kind, fields: Mapping[str, object]) -> bytes:
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
    assert len(text) <= RECORD_LIMIT_BYTES, f"A record of {len(text)} bytes exceeds {RECORD_LIMIT_BYTES}"
    body = bytes((kind,)) + len(text).to_bytes(4, "little") + text
    return body + xxhash.xxh3_64_digest(body)


def _header_of(fields: Mapping[str, object]) -> ArchiveHeader:
    version, digest = fields["version"], fields["digest"]
    if (version, digest) != (FORMAT_VERSION, DIGEST_NAME):
        raise ArchiveError(
            f"it has format {version!r} with {digest!r} checksums; this version reads format "
            f"{FORMAT_VERSION} with {DIGEST_NAME}"
        )
    details = fields["details"]
    if not isinstance(details, dict) or not all(isinstance(value, str) for value in details.values()):
        raise ValueError("its details are not strings")
    limit = _number(fields["block_token_limit"], least=1, most=TOKEN_LIMIT)
    return ArchiveHeader(Fingerprint(_name(fields["fingerprint"])), limit, details)


def _name(text: object, *, may_be_empty: bool = False) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a name is not a string")
    name = bytes.fromhex(text)
    if len(name) != _NAME_BYTES and not (may_be_empty and not name):
        raise ValueError(f"a name has {len(name)} bytes, not {_NAME_BYTES}")
    return name


def _number(value: object, *, least: int = 0, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not a number from {least} to {most}")
    return value


@contextlib.contextmanager
def _parsing_errors(position: int) -> Iterator[None]:
    """Raise `ArchiveError` for whatever parsing a hostile record may raise."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"the record at byte {position} cannot be used: {error}") from error
