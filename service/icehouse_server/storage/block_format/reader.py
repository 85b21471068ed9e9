"""Block reader: verified, and straight to where the bytes are wanted.

Runs on any thread; owns nothing but the buffers it fills. The kv tensors of consecutive
blocks are read into one buffer per tensor, so that a restore is left with one copy; every
region is hashed in file order right behind each read, while its bytes are in the CPU's cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from icehouse_server.domain.blocks import BlockHeader, Damage, HostRegion, HostTensor, RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.block_facts import BlockFile, FileRegion, FileTensor
from icehouse_server.storage.block_format.damage import BlockFileError
from icehouse_server.storage.block_format.file import GROUP_BYTES, groups, read_head, slices
from icehouse_server.storage.block_format.header import DTYPE_BYTES
from icehouse_server.storage.block_format.read_pace import ReadPace
from icehouse_server.storage.disk_error import is_shortage
from icehouse_server.storage.files import Files
from icehouse_server.storage.loads import LoadedBlock, LoadRequest, PlannedBlock

if TYPE_CHECKING:
    # Of an optional extra: loaded only where a key is configured.
    from icehouse_server.storage.encryption.aes_gcm import Cipher, FileCipher

_TOKEN_AXIS = -2
_ALIGNMENT_BYTES = 64


def empty_bytes(size_bytes: int) -> memoryview:
    """Return an uninitialised flat buffer of format "B"."""
    return np.empty(size_bytes, dtype=np.uint8).data


@dataclasses.dataclass(frozen=True, slots=True)
class KvBuffers:
    """Where the kv tensors of a load go: one buffer per tensor, `capacity` rows along the token axis."""

    tensors: tuple[HostTensor, ...]
    origin_token_index: int
    capacity_token_count: int

    @classmethod
    def of(cls, request: LoadRequest) -> KvBuffers:
        """Return the buffers that the request brought along."""
        for target in request.targets:
            rows = target.shape[_TOKEN_AXIS]
            assert rows == request.capacity_token_count, f"{target.name} has {rows} rows"
        return cls(request.targets, request.origin_token_index, request.capacity_token_count)

    @classmethod
    def like(cls, region: FileRegion, *, origin_token_index: int, capacity_token_count: int) -> KvBuffers:
        """Return buffers for blocks whose kv region is shaped like this one.

        Raises `BlockFileError` when a tensor has no token axis.
        """
        places = []
        size_bytes = 0
        for tensor in region.tensors:
            if len(tensor.shape) < 2:
                raise BlockFileError(
                    Damage.LAYOUT, f"{tensor.name} of shape {tensor.shape} has no token axis"
                )
            shape = (*tensor.shape[:_TOKEN_AXIS], capacity_token_count, tensor.shape[-1])
            places.append((tensor, shape, size_bytes))
            size_bytes += prod(shape) * DTYPE_BYTES[tensor.dtype]
            size_bytes += -size_bytes % _ALIGNMENT_BYTES
        # One allocation for all: the system backs a large one with large pages, which fault rarely.
        whole = empty_bytes(size_bytes)
        tensors = [
            HostTensor(
                tensor.name,
                tensor.dtype,
                shape,
                whole[begin : begin + prod(shape) * DTYPE_BYTES[tensor.dtype]],
            )
            for tensor, shape, begin in places
        ]
        return cls(tuple(tensors), origin_token_index, capacity_token_count)

    def segments(self, region: FileRegion, *, start_token_index: int, token_count: int) -> list[memoryview]:
        """Return, in file order, where the bytes of a block's kv region go; rows beyond capacity go nowhere.

        Raises `BlockFileError` when the region's tensors are not those of the buffers.
        """
        first_row = start_token_index - self.origin_token_index
        placed_rows = min(token_count, self.capacity_token_count - first_row)
        assert first_row >= 0 and placed_rows > 0, (
            f"Rows {first_row}+{token_count} lie outside of the buffers"
        )
        if len(region.tensors) != len(self.tensors):
            raise BlockFileError(Damage.LAYOUT, f"{len(region.tensors)} kv tensors, not {len(self.tensors)}")
        segments: list[memoryview] = []
        for source, target in zip(region.tensors, self.tensors, strict=True):
            _check_alike(source, target, token_count=token_count)
            row_bytes = source.shape[-1] * DTYPE_BYTES[source.dtype]
            size_bytes = placed_rows * row_bytes
            stride_bytes = self.capacity_token_count * row_bytes
            if target.data.nbytes == 0:
                continue
            begins = range(first_row * row_bytes, target.data.nbytes, stride_bytes)
            placed = [target.data[begin : begin + size_bytes] for begin in begins]
            if placed_rows == token_count:
                segments += placed
            else:
                # A buffer of its own each time: parts are hashed only after several were read.
                rest_bytes = (token_count - placed_rows) * row_bytes
                segments += [part for head in placed for part in (head, empty_bytes(rest_bytes))]
        return segments


def open_block(
    files: Files, path: str, planned: PlannedBlock, *, cipher: Cipher | None
) -> tuple[int, BlockFile]:
    """Open a block's file and prove that it is the expected block; return its descriptor and facts.

    Raises `BlockFileError`; the descriptor is the caller's to close.
    """
    try:
        descriptor = files.open(path)
    except FileNotFoundError as error:
        raise BlockFileError(Damage.MISSING, f"{path} is gone") from error
    except OSError as error:
        raise BlockFileError(_damage_of(error), f"{path} cannot be opened: {error}") from error
    try:
        file = _read_own_head(files, descriptor, path, cipher)
        if file.header != planned.header:
            raise BlockFileError(Damage.MISMATCH, f"{path} holds another block than expected")
        missing = [kind for kind in planned.regions if file.region(kind) is None]
        if missing:
            raise BlockFileError(Damage.MISMATCH, f"{path} has no region {', '.join(sorted(missing))}")
    except BaseException:
        files.close(descriptor)
        raise
    return descriptor, file


def read_header(files: Files, path: str, name: BlockHash, *, cipher: Cipher | None) -> BlockHeader:
    """Return the header of the block of this name, token ids included.

    Raises `BlockFileError` when the file holds another one or is damaged, `OSError` from the system.
    """
    descriptor = files.open(path)
    try:
        header = _read_own_head(files, descriptor, path, cipher).header
    finally:
        files.close(descriptor)
    if header is None or header.hash != name:
        raise BlockFileError(Damage.MISMATCH, f"{path} holds another block than expected")
    return header


def read_block(
    files: Files,
    descriptor: int,
    file: BlockFile,
    planned: PlannedBlock,
    buffers: KvBuffers | None,
    *,
    pace: ReadPace,
) -> LoadedBlock:
    """Read and verify the wanted regions of an open block at this pace; kv goes to `buffers`.

    Raises `BlockFileError`; buffers then hold bytes that must not be used.
    """
    loaded = []
    for region in file.regions:
        if region.kind not in planned.regions:
            continue
        if region.kind is RegionKind.KV:
            assert buffers is not None, "kv is wanted but has nowhere to go"
            parts = buffers.segments(
                region,
                start_token_index=planned.header.start_token_index,
                token_count=planned.header.token_count,
            )
            _read_verified(files, descriptor, region, parts, cipher=file.cipher, pace=pace)
        else:
            data = empty_bytes(region.size_bytes)
            _read_verified(files, descriptor, region, slices(data), cipher=file.cipher, pace=pace)
            loaded.append(_host_region(region, data))
    return LoadedBlock(planned.header, tuple(loaded))


def verify_block(files: Files, path: str, *, cipher: Cipher | None = None) -> BlockFile:
    """Read and prove every region of a file, by its tag too where `cipher` has the key; return its facts.

    Raises `BlockFileError`.
    """
    try:
        descriptor = files.open(path)
    except FileNotFoundError as error:
        raise BlockFileError(Damage.MISSING, f"{path} is gone") from error
    except OSError as error:
        raise BlockFileError(_damage_of(error), f"{path} cannot be opened: {error}") from error
    try:
        file = _read_head(files, descriptor, path, cipher)
        for region in file.regions:
            _read_verified(files, descriptor, region, _scratch_parts(region), cipher=file.cipher)
        return file
    finally:
        files.close(descriptor)


def _read_own_head(files: Files, descriptor: int, path: str, cipher: Cipher | None) -> BlockFile:
    """Return the head of a block that this server wrote: with a key, it encrypted it."""
    file = _read_head(files, descriptor, path, cipher)
    if (file.cipher is None) != (cipher is None):
        raise BlockFileError(
            Damage.AUTH_TAG, f"{path} is not encrypted under the key in use, as it should be"
        )
    return file


def _read_head(files: Files, descriptor: int, path: str, cipher: Cipher | None) -> BlockFile:
    try:
        return read_head(files, descriptor, cipher=cipher)
    except OSError as error:
        raise BlockFileError(_damage_of(error), f"{path} cannot be read: {error}") from error


def _damage_of(error: OSError) -> Damage:
    return Damage.MEMORY if is_shortage(error) else Damage.IO


def _read_verified(
    files: Files,
    descriptor: int,
    region: FileRegion,
    parts: Iterable[memoryview],
    *,
    cipher: FileCipher | None,
    pace: ReadPace | None = None,
) -> None:
    """Fill `parts`, which cover the region in file order, decrypt them in place, and prove them."""
    decryptor = cipher.decryptor(region.kind, tag=region.tag) if cipher else None
    digest = xxhash.xxh3_64()
    update = digest.update
    offset = region.offset
    for group, size_bytes in groups(parts):
        if pace is not None:
            pace.keep()
        try:
            got = files.read_into(descriptor, group, offset=offset)
        except OSError as error:
            raise BlockFileError(
                _damage_of(error), f"region {region.kind} cannot be read: {error}"
            ) from error
        if got != size_bytes:
            raise BlockFileError(Damage.TRUNCATED, f"region {region.kind} ends after {offset + got} bytes")
        for part in group:
            update(part)
            if decryptor is not None:
                decryptor.update(part)
        offset += size_bytes
    assert offset == region.offset + region.size_bytes, f"{region.kind} was not covered exactly"
    if digest.intdigest() != region.checksum:
        raise BlockFileError(
            Damage.CHECKSUM, f"region {region.kind} does not have the checksum of its header"
        )
    if decryptor is not None and not decryptor.finish():
        raise BlockFileError(
            Damage.AUTH_TAG, f"region {region.kind} is not what was encrypted under this key"
        )


def _scratch_parts(region: FileRegion) -> Iterator[memoryview]:
    """Yield one buffer again and again until the region is covered; each is a group of its own."""
    scratch = empty_bytes(GROUP_BYTES)
    for begin in range(0, region.size_bytes, GROUP_BYTES):
        yield scratch[: region.size_bytes - begin]


def _host_region(region: FileRegion, data: memoryview) -> HostRegion:
    tensors = []
    for tensor in region.tensors:
        begin = tensor.offset - region.offset
        tensors.append(
            HostTensor(tensor.name, tensor.dtype, tensor.shape, data[begin : begin + tensor.size_bytes])
        )
    return HostRegion(region.kind, tuple(tensors))


def _check_alike(source: FileTensor, target: HostTensor, *, token_count: int) -> None:
    is_alike = (
        source.name == target.name
        and source.dtype == target.dtype
        and len(source.shape) == len(target.shape)
        and source.shape[:_TOKEN_AXIS] == target.shape[:_TOKEN_AXIS]
        and source.shape[-1] == target.shape[-1]
        and source.shape[_TOKEN_AXIS] == token_count
    )
    if not is_alike:
        raise BlockFileError(
            Damage.LAYOUT,
            f"{source.name} {source.dtype}{source.shape} does not continue "
            f"{target.name} {target.dtype}{target.shape}",
        )
