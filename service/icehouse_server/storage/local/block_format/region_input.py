"""Region input: the bytes of one region of an open block file, in order, decrypted and checked.

Bytes are hashed right after each read, while they are in the CPU's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.storage.disk_error import is_shortage
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.file_region import FileRegion
from icehouse_server.storage.local.block_format.header import BlockFileError
from icehouse_server.storage.local.encryption.constants import FileCipher

GROUP_BYTES = 256 << 10
"""Bytes that are hashed and transferred at a time; several groups fit the second-level cache."""


@dataclasses.dataclass(slots=True)
class ReadMeter:
    """How a reader spent its time, in bytes, and in seconds by `now`."""

    now: Callable[[], float] = lambda: 0.0
    disk_bytes: int = 0
    """Bytes read from files."""
    disk_s: float = 0.0
    """Time spent reading them, not processing them."""
    decoded_bytes: int = 0
    """Tensors' bytes decoded from byte planes."""
    decode_s: float = 0.0


class RegionInput:
    """Reads a region from its beginning. The bytes must not be used before `finish` has returned."""

    def __init__(
        self,
        files: Files,
        descriptor: int,
        region: FileRegion,
        *,
        cipher: FileCipher | None,
        before_read: Callable[[], None] = lambda: None,
        meter: ReadMeter | None = None,
    ) -> None:
        """`before_read` is called before each read."""
        self._files = files
        self._descriptor = descriptor
        self.region = region
        self.meter = meter or ReadMeter()
        self._before_read = before_read
        self._decryptor = cipher.decryptor(region.kind, tag=region.tag) if cipher else None
        self._digest = xxhash.xxh3_64()
        self._offset = region.offset

    @property
    def left_bytes(self) -> int:
        return self.region.offset + self.region.stored_bytes - self._offset

    def fill(self, parts: Sequence[memoryview], size_bytes: int) -> None:
        """Read the next bytes into `parts`, `size_bytes` in total. Raises `BlockFileError`."""
        self._before_read()
        kind, began_s = self.region.kind, self.meter.now()
        try:
            got = self._files.read_into(self._descriptor, parts, offset=self._offset)
        except OSError as error:
            raise BlockFileError(damage_of(error), f"region {kind} cannot be read: {error}") from error
        self.meter.disk_s += self.meter.now() - began_s
        self.meter.disk_bytes += got
        if got != size_bytes:
            raise BlockFileError(
                BlockDamage.TRUNCATED, f"region {kind} ends after {self._offset + got} bytes"
            )
        for part in parts:
            self._digest.update(part)
            if self._decryptor is not None:
                self._decryptor.update(part)
        self._offset += size_bytes

    def finish(self) -> None:
        """Check all bytes that were read. Raises `BlockFileError`."""
        kind = self.region.kind
        assert self.left_bytes == 0, f"{kind} was not covered exactly"
        if self._digest.intdigest() != self.region.checksum:
            raise BlockFileError(
                BlockDamage.CHECKSUM, f"region {kind} does not have the checksum of its header"
            )
        if self._decryptor is not None and not self._decryptor.finish():
            raise BlockFileError(
                BlockDamage.AUTH_TAG, f"region {kind} is not what was encrypted under this key"
            )


def damage_of(error: OSError) -> BlockDamage:
    """Return what a disk error says about a block."""
    return BlockDamage.MEMORY if is_shortage(error) else BlockDamage.IO


def slices(data: memoryview) -> Iterator[memoryview]:
    """Yield a buffer in pieces that fit a group."""
    if data.nbytes <= GROUP_BYTES:
        yield data
    else:
        for begin in range(0, data.nbytes, GROUP_BYTES):
            yield data[begin : begin + GROUP_BYTES]


def groups(parts: Iterable[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield runs of parts to be transferred and hashed together while they are cached, with their bytes."""
    group: list[memoryview] = []
    size_bytes = 0
    for part in parts:
        group.append(part)
        size_bytes += part.nbytes
        if size_bytes >= GROUP_BYTES:
            yield group, size_bytes
            group, size_bytes = [], 0
    if group:
        yield group, size_bytes
