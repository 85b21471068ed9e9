"""Block file: one block as one self-describing safetensors file; written, read and verified here.

Layout: 8 bytes of header length (little endian), a JSON header padded with spaces to a
multiple of 8, then the regions kv, window, checkpoint, each contiguous, each tensor as its
C-contiguous bytes or, where that takes less, in byte planes. We write the header ourselves because the
safetensors library orders tensors by dtype, and a restore needs regions as ranges; every
safetensors reader can read the result.

Trust: the header's first value is the xxh3 of the whole header with that value set to zeros,
so every changed bit of the header is noticed; each region carries the xxh3 of its bytes, and one
in planes that of its tensors too; the block's hash is recomputed from its parent and token
ids. All of it is checked before a byte is used. `__metadata__` begins the same way in every layout ABI,
so that other ABIs can be told from damage. With a cipher the regions and most of the head are encrypted.

Any thread may call these functions. Bytes are hashed in file order right before each write and right
after each read, while they are in the CPU's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np
import xxhash

from icehouse_server.domain.blocks import (
    BlockDamage,
    BlockHeader,
    HostBlock,
    HostRegion,
    HostTensor,
    RegionKind,
    block_hash,
)
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import KvTarget, LoadedBlock, PlannedBlock, TensorShape
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.file_region import REGION_ORDER, FileRegion, Planes
from icehouse_server.storage.local.block_format.header import (
    DTYPE_BYTES,
    BlockFile,
    BlockFileError,
    BlockOutline,
    encode_head,
    file_cipher_of,
    head_length,
    parse_head,
)
from icehouse_server.storage.local.block_format.plane_region import (
    PlaneOutput,
    gains,
    read_planes,
    stored_limit_bytes,
)
from icehouse_server.storage.local.block_format.region_input import (
    GROUP_BYTES,
    ReadMeter,
    RegionInput,
    damage_of,
    groups,
    slices,
)
from icehouse_server.storage.local.encryption.constants import TAG_BYTES, Cipher, Encryptor, FileCipher

_FIRST_READ_BYTES = 32 << 10
"""One read of this size covers the head of all but the deepest models."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block whose facts have been checked and whose largest file size is known."""

    block: HostBlock
    cipher: Cipher | None
    """Encrypts it."""
    regions: tuple[FileRegion, ...]
    """As they will be in the file, except that regions in planes may take less."""
    head_bytes: int
    file_bytes: int
    """At most."""


def prepare_block(
    block: HostBlock, *, cipher: Cipher | None = None, has_planes: bool = False
) -> PreparedBlock:
    """Check a block before anything is reserved or written for it. With `has_planes` the regions that shrink
    enough are stored in byte planes.

    A wrong hash, or a tensor whose size does not match its shape, is a broken invariant of the caller.
    """
    header = block.header
    secret = cipher.name_secret if cipher else b""
    expected = block_hash(parent=header.parent, token_ids=header.token_ids, extra=header.extra, secret=secret)
    assert header.hash == expected, f"Block {header.hash.hex()} does not have the hash of its tokens"
    kinds = [region.kind for region in block.regions]
    assert kinds == [kind for kind in REGION_ORDER if kind in kinds], f"Regions out of order: {kinds}"
    regions: list[FileRegion] = []
    for region in block.regions:
        names = [tensor.name for tensor in region.tensors]
        assert len(set(names)) == len(names), f"Two tensors of one name in region {region.kind}"
        for tensor in region.tensors:
            size_bytes = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert tensor.data.nbytes == size_bytes, f"{tensor.name} does not have {size_bytes} bytes"
        # Checksums, tags and salts have fixed widths, so the head's length is known before their values are.
        offset = regions[-1].offset + regions[-1].stored_bytes if regions else 0
        regions.append(_planned_region(region, offset, cipher=cipher, has_planes=has_planes))
    head, _ = encode_head(header, regions, _new_file_cipher(block, cipher))
    file_bytes = len(head) + sum(region.stored_bytes for region in regions)
    return PreparedBlock(block, cipher, tuple(regions), head_bytes=len(head), file_bytes=file_bytes)


def write_block(files: Files, descriptor: int, prepared: PreparedBlock) -> BlockFile:
    """Write a block into a new, empty file and return the file's facts.

    Tensor bytes are encrypted and hashed group by group, and without encryption never copied; the head,
    which contains the checksums, comes last.
    """
    block = prepared.block
    # Every attempt gets a new salt: one file key never encrypts two files.
    file_cipher = _new_file_cipher(block, prepared.cipher)
    scratch = memoryview(bytearray(2 * GROUP_BYTES if file_cipher else 0))
    regions: list[FileRegion] = []
    offset = prepared.head_bytes
    for region, planned in zip(block.regions, prepared.regions, strict=True):
        output = PlaneOutput(region, planned.tensors) if planned.planes else None
        parts = (part for tensor in region.tensors for part in slices(tensor.data))
        begin = offset
        digest = xxhash.xxh3_64()
        encryptor = file_cipher.encryptor(region.kind) if file_cipher else None
        for group, size_bytes in output.groups() if output else groups(parts):
            written = _encrypt(encryptor, group, scratch) if encryptor else group
            for part in written:
                digest.update(part)
            files.write(descriptor, written, offset=offset)
            offset += size_bytes
        regions.append(
            dataclasses.replace(
                planned,
                offset=begin,
                checksum=digest.intdigest(),
                tag=encryptor.finish() if encryptor else b"",
                planes=Planes(offset - begin, output.checksum) if output else None,
            )
        )
    # Planes may take less than was planned, and so may the head's numbers.
    head, header_checksum = encode_head(block.header, regions, file_cipher, head_bytes=prepared.head_bytes)
    assert len(head) == prepared.head_bytes and offset <= prepared.file_bytes, "The file's size is another"
    files.write(descriptor, [head], offset=0)
    return BlockFile(
        outline=BlockOutline.of(block.header),
        header=block.header,
        regions=tuple(regions),
        file_bytes=offset,
        header_checksum=header_checksum,
        key_id=file_cipher.key_id if file_cipher else b"",
        cipher=file_cipher,
    )


def read_head(files: Files, descriptor: int, *, cipher: Cipher | None = None) -> BlockFile:
    """Return what an open file says about itself, fully checked except for its tensor bytes.

    If the file is encrypted and `cipher` lacks its key, that is only its outline and its regions.
    Raises `BlockFileError` if it is damaged or of another ABI, `OSError` from the system.
    """
    file_bytes = files.size(descriptor)
    head = _read_exactly(files, descriptor, min(file_bytes, _FIRST_READ_BYTES), offset=0)
    head_bytes = head_length(head, file_bytes=file_bytes)
    if head_bytes > len(head):
        head += _read_exactly(files, descriptor, head_bytes - len(head), offset=len(head))
    return parse_head(head[:head_bytes], file_bytes=file_bytes, cipher=cipher)


@contextlib.contextmanager
def open_block(
    files: Files, path: str, planned: PlannedBlock, *, cipher: Cipher | None
) -> Iterator[tuple[int, BlockFile]]:
    """Open a block's file and check that it is the expected block; yield its descriptor and facts.

    Raises `BlockFileError`, and `OSError` if closing fails.
    """
    with _opened_block(files, path, cipher, is_own=True) as (descriptor, file):
        if file.header != planned.header:
            raise BlockFileError(BlockDamage.MISMATCH, f"{path} holds another block than expected")
        missing = planned.regions - {region.kind for region in file.regions}
        if missing:
            raise BlockFileError(BlockDamage.MISMATCH, f"{path} has no region {', '.join(sorted(missing))}")
        yield descriptor, file


def read_header(files: Files, path: str, name: BlockHash, *, cipher: Cipher | None) -> BlockHeader:
    """Return the header of the block of this name, token ids included.

    Raises `BlockFileError` if the file holds another one or is damaged, `OSError` if closing fails.
    """
    with _opened_block(files, path, cipher, is_own=True) as (_, file):
        header = file.header
    if header is None or header.hash != name:
        raise BlockFileError(BlockDamage.MISMATCH, f"{path} holds another block than expected")
    return header


def read_block(
    files: Files,
    descriptor: int,
    file: BlockFile,
    planned: PlannedBlock,
    target: KvTarget | None,
    *,
    before_read: Callable[[], None],
    meter: ReadMeter | None = None,
) -> LoadedBlock:
    """Read and verify the wanted regions of an open block; KV goes to `target`, if there is one.
    `before_read` is called before each group of bytes, and `meter` counts bytes and time.

    Raises `BlockFileError` or `LayoutMismatch`; the target then holds bytes that must not be used.
    """
    loaded = []
    for region in file.regions:
        if region.kind not in planned.regions:
            continue
        if region.kind is RegionKind.KV and target is not None:
            segments = target.segments(
                region.tensors,
                start_token_index=planned.header.start_token_index,
                token_count=planned.header.token_count,
            )
        else:
            data = _empty_bytes(region.size_bytes)
            segments = [data]
            loaded.append(_host_region(region, data))
        source = RegionInput(
            files, descriptor, region, cipher=file.cipher, before_read=before_read, meter=meter
        )
        _read_verified(source, segments)
    return LoadedBlock(planned.header, tuple(loaded))


def verify_block(files: Files, path: str, *, cipher: Cipher | None = None) -> BlockFile:
    """Read and check every region of a file, and if `cipher` has the key of an encrypted one, its tags and
    its tensors too; return its facts.

    Raises `BlockFileError`.
    """
    with _opened_block(files, path, cipher) as (descriptor, file):
        scratch = _empty_bytes(GROUP_BYTES)
        for region in file.regions:
            if file.header is None:
                # Encrypted under an unknown key: only the stored bytes can be checked.
                region = dataclasses.replace(region, size_bytes=region.stored_bytes, planes=None)
            source = RegionInput(files, descriptor, region, cipher=file.cipher)
            _read_verified(source, _repeated(scratch, region.size_bytes))
    return file


def _new_file_cipher(block: HostBlock, cipher: Cipher | None) -> FileCipher | None:
    if cipher is None:
        return None
    return file_cipher_of(cipher, BlockOutline.of(block.header), salt=cipher.new_salt())


def _planned_region(
    region: HostRegion, offset: int, *, cipher: Cipher | None, has_planes: bool
) -> FileRegion:
    """Return a region with empty checksum and tag."""
    tensors = tuple(TensorShape(t.name, t.dtype, t.shape, t.data.nbytes) for t in region.tensors)
    tag = bytes(TAG_BYTES) if cipher else b""
    planes = None
    if has_planes and gains(region, tensors):
        planes = Planes(stored_limit_bytes(tensors), checksum=0)
    return FileRegion(region.kind, offset, region.size_bytes, 0, tensors, tag, planes)


def _encrypt(encryptor: Encryptor, group: Sequence[memoryview], scratch: memoryview) -> list[memoryview]:
    """Encrypt a group's bytes into `scratch`, and return that part of it."""
    begin = 0
    for part in group:
        encryptor.update(part, scratch[begin : begin + part.nbytes])
        begin += part.nbytes
    return [scratch[:begin]]


def _read_exactly(files: Files, descriptor: int, size_bytes: int, *, offset: int) -> bytes:
    buffer = bytearray(size_bytes)
    got = files.read_into(descriptor, [memoryview(buffer)], offset=offset)
    if got != size_bytes:
        raise BlockFileError(BlockDamage.TRUNCATED, f"{got} bytes at {offset}, where {size_bytes} were due")
    return bytes(buffer)


@contextlib.contextmanager
def _opened_block(
    files: Files, path: str, cipher: Cipher | None, *, is_own: bool = False
) -> Iterator[tuple[int, BlockFile]]:
    """Open a block file and yield its descriptor and facts. `is_own`: this server wrote it, so it is
    encrypted if there is a key. Raises `BlockFileError`."""
    try:
        descriptor = files.open(path)
    except FileNotFoundError as error:
        raise BlockFileError(BlockDamage.MISSING, f"{path} is gone") from error
    except OSError as error:
        raise BlockFileError(damage_of(error), f"{path} cannot be opened: {error}") from error
    try:
        try:
            file = read_head(files, descriptor, cipher=cipher)
        except OSError as error:
            raise BlockFileError(damage_of(error), f"{path} cannot be read: {error}") from error
        if is_own and (file.cipher is None) != (cipher is None):
            raise BlockFileError(BlockDamage.AUTH_TAG, f"{path} is not encrypted under the key in use")
        yield descriptor, file
    finally:
        files.close(descriptor)


def _read_verified(source: RegionInput, target: Iterable[memoryview]) -> None:
    """Fill `target`, which covers the region's tensors in order, and verify it. Raises `BlockFileError`."""
    if source.region.planes is not None:
        read_planes(source, target)
        return
    for group, size_bytes in groups(part for segment in target for part in slices(segment)):
        source.fill(group, size_bytes)
    source.finish()


def _repeated(scratch: memoryview, size_bytes: int) -> Iterator[memoryview]:
    """Yield `scratch` repeatedly, `size_bytes` in total."""
    for begin in range(0, size_bytes, len(scratch)):
        yield scratch[: size_bytes - begin]


def _empty_bytes(size_bytes: int) -> memoryview:
    """Return an uninitialised flat buffer of format "B"."""
    return np.empty(size_bytes, dtype=np.uint8).data


def _host_region(region: FileRegion, data: memoryview) -> HostRegion:
    """Return a region whose tensors are views of its bytes."""
    tensors = []
    begin = 0
    for tensor in region.tensors:
        end = begin + tensor.size_bytes
        tensors.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, data[begin:end]))
        begin = end
    return HostRegion(region.kind, tuple(tensors))
