"""Block reader: verified, and straight to where the bytes are wanted.

Runs on any thread; owns nothing but the memory it makes for what has no place to go. Every region is
hashed in file order right behind each read, while its bytes are in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from icehouse_server.domain.blocks import BlockHeader, Damage, HostRegion, HostTensor, RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import KvPlace, LoadedBlock, PlannedBlock
from icehouse_server.storage.disk_error import is_shortage
from icehouse_server.storage.files import Files, opened
from icehouse_server.storage.local.block_format.damage import BlockFileError
from icehouse_server.storage.local.block_format.facts import BlockFile, FileRegion
from icehouse_server.storage.local.block_format.file import GROUP_BYTES, groups, read_head, slices
from icehouse_server.storage.local.block_format.read_pace import ReadPace
from icehouse_server.storage.local.encryption.facts import Cipher, FileCipher


def open_block(
    files: Files, path: str, planned: PlannedBlock, *, cipher: Cipher | None
) -> tuple[int, BlockFile]:
    """Open a block's file and prove that it is the expected block; return its descriptor and facts.

    Raises `BlockFileError`; the descriptor is the caller's to close.
    """
    descriptor = _open(files, path)
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
    with opened(files, path) as descriptor:
        header = _read_own_head(files, descriptor, path, cipher).header
    if header is None or header.hash != name:
        raise BlockFileError(Damage.MISMATCH, f"{path} holds another block than expected")
    return header


def read_block(
    files: Files,
    descriptor: int,
    file: BlockFile,
    planned: PlannedBlock,
    place: KvPlace | None,
    *,
    pace: ReadPace,
) -> LoadedBlock:
    """Read and verify the wanted regions of an open block at this pace; kv goes to `place`, if there is one.

    Raises `BlockFileError` or `UnfitLayout`; the place then holds bytes that must not be used.
    """
    loaded = []
    for region in file.regions:
        if region.kind not in planned.regions:
            continue
        if region.kind is RegionKind.KV and place is not None:
            segments = place.segments(
                region.tensors,
                start_token_index=planned.header.start_token_index,
                token_count=planned.header.token_count,
            )
            parts = (part for segment in segments for part in slices(segment))
            _read_verified(files, descriptor, region, parts, cipher=file.cipher, pace=pace)
        else:
            data = _empty_bytes(region.size_bytes)
            _read_verified(files, descriptor, region, slices(data), cipher=file.cipher, pace=pace)
            loaded.append(_host_region(region, data))
    return LoadedBlock(planned.header, tuple(loaded))


def verify_block(files: Files, path: str, *, cipher: Cipher | None = None) -> BlockFile:
    """Read and prove every region of a file, by its tag too where `cipher` has the key; return its facts.

    Raises `BlockFileError`.
    """
    descriptor = _open(files, path)
    try:
        file = _read_head(files, descriptor, path, cipher)
        for region in file.regions:
            _read_verified(files, descriptor, region, _scratch_parts(region), cipher=file.cipher)
        return file
    finally:
        files.close(descriptor)


def _open(files: Files, path: str) -> int:
    try:
        return files.open(path)
    except FileNotFoundError as error:
        raise BlockFileError(Damage.MISSING, f"{path} is gone") from error
    except OSError as error:
        raise BlockFileError(_damage_of(error), f"{path} cannot be opened: {error}") from error


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
    scratch = _empty_bytes(GROUP_BYTES)
    for begin in range(0, region.size_bytes, GROUP_BYTES):
        yield scratch[: region.size_bytes - begin]


def _empty_bytes(size_bytes: int) -> memoryview:
    """Return an uninitialised flat buffer of format "B"."""
    return np.empty(size_bytes, dtype=np.uint8).data


def _host_region(region: FileRegion, data: memoryview) -> HostRegion:
    tensors = []
    for tensor in region.tensors:
        begin = tensor.offset - region.offset
        tensors.append(
            HostTensor(tensor.name, tensor.dtype, tensor.shape, data[begin : begin + tensor.size_bytes])
        )
    return HostRegion(region.kind, tuple(tensors))
