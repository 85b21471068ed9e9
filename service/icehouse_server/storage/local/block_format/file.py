"""Block file: one block as one safetensors file that describes itself.

Layout: 8 bytes of header length (little endian), a JSON header padded with spaces to a
multiple of 8, then the regions kv, window, checkpoint, each contiguous, each tensor as its
C-contiguous bytes. The header is written here and not by the safetensors library because
the library orders tensors by dtype, and a restore needs regions as ranges; every safetensors
reader can read the result.

Trust: the header's first value is the xxh3 of the whole header with that value set to zeros,
so no bit of the header can change unseen; each region carries the xxh3 of its bytes; the
block's hash is computed again from its parent and token ids. All of it is checked before a
byte is used. `__metadata__` begins so in every layout ABI, so that other ABIs can be told
from damage. With a cipher the regions are encrypted and the head is an `encrypted_header`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import xxhash

from icehouse_server.domain.blocks import Damage, HostBlock, block_hash
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.damage import BlockFileError
from icehouse_server.storage.local.block_format.encrypted_header import (
    FileKey,
    encode_encrypted_header,
    is_encrypted_header,
    parse_encrypted_header,
)
from icehouse_server.storage.local.block_format.facts import BlockFile, BlockOutline, FileRegion, FileTensor
from icehouse_server.storage.local.block_format.header import (
    DTYPE_BYTES,
    REGION_ORDER,
    encode_head,
    head_length,
    parse_head,
)
from icehouse_server.storage.local.encryption.facts import TAG_BYTES, Cipher, Encryptor, FileCipher

GROUP_BYTES = 256 << 10
"""Bytes that are hashed and transferred at a time; several fit the second-level cache."""
_FIRST_READ_BYTES = 32 << 10
"""Covers the head of all but the deepest models in one read."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block whose facts have been checked and whose file's size is known."""

    block: HostBlock
    cipher: Cipher | None
    """Encrypts it."""
    head_bytes: int
    file_bytes: int


def prepare_block(block: HostBlock, *, cipher: Cipher | None = None) -> PreparedBlock:
    """Check a block before anything is reserved or written for it.

    A block whose hash is not that of its tokens, or whose tensors lie about their sizes,
    is a broken invariant of the caller.
    """
    header = block.header
    secret = cipher.name_secret if cipher else b""
    expected = block_hash(parent=header.parent, token_ids=header.token_ids, extra=header.extra, secret=secret)
    assert header.hash == expected, f"Block {header.hash.hex()} does not have the hash of its tokens"
    kinds = [region.kind for region in block.regions]
    assert kinds == [kind for kind in REGION_ORDER if kind in kinds], f"Regions out of order: {kinds}"
    for region in block.regions:
        names = [tensor.name for tensor in region.tensors]
        assert len(set(names)) == len(names), f"Two tensors of one name in region {region.kind}"
        for tensor in region.tensors:
            size_bytes = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert tensor.data.nbytes == size_bytes, f"{tensor.name} does not have {size_bytes} bytes"
    # Checksums, tags and salts have fixed widths, so the head's length is known before they are.
    proofs = [_Proof(0, bytes(TAG_BYTES) if cipher else b"")] * len(block.regions)
    head, _ = _encode(block, _describe(block, proofs, begin=0), _Encryption.of(block, cipher), begin=0)
    return PreparedBlock(block, cipher, head_bytes=len(head), file_bytes=len(head) + block.size_bytes)


def write_block(files: Files, descriptor: int, prepared: PreparedBlock) -> BlockFile:
    """Write a block into a new, empty file and return what the file says.

    Tensor bytes are encrypted and hashed group by group right before they are written, while
    they are in the CPU's cache, and in the clear never copied here; the head, which holds the
    checksums, comes last.
    """
    block = prepared.block
    offset = prepared.head_bytes
    proofs = []
    # A new salt for every attempt: one file key never encrypts two files.
    encryption = _Encryption.of(block, prepared.cipher)
    for region in block.regions:
        digest = xxhash.xxh3_64()
        encryptor = encryption.cipher.encryptor(region.kind) if encryption else None
        for group, size_bytes in groups(part for tensor in region.tensors for part in slices(tensor.data)):
            written = encryption.encrypt(encryptor, group) if encryption and encryptor else group
            for part in written:
                digest.update(part)
            files.write(descriptor, written, offset=offset)
            offset += size_bytes
        proofs.append(_Proof(digest.intdigest(), encryptor.finish() if encryptor else b""))
    regions = _describe(block, proofs, begin=prepared.head_bytes)
    head, header_checksum = _encode(block, regions, encryption, begin=prepared.head_bytes)
    assert (len(head), offset) == (prepared.head_bytes, prepared.file_bytes), (
        "The file is not what was prepared"
    )
    files.write(descriptor, [head], offset=0)
    return BlockFile(
        outline=BlockOutline.of(block.header),
        header=block.header,
        regions=regions,
        file_bytes=offset,
        header_checksum=header_checksum,
        key_id=encryption.file_key.key_id if encryption else b"",
        cipher=encryption.cipher if encryption else None,
    )


def read_head(files: Files, descriptor: int, *, cipher: Cipher | None = None) -> BlockFile:
    """Return what an open file says about itself, fully checked except for its tensor bytes.

    Of an encrypted file whose key `cipher` does not have, that is its outline and its regions.
    Raises `BlockFileError` when it is damaged or of another ABI, `OSError` from the system.
    """
    file_bytes = files.size(descriptor)
    buffer = bytearray(min(file_bytes, _FIRST_READ_BYTES))
    _read_exactly(files, descriptor, memoryview(buffer), offset=0)
    head_bytes = head_length(buffer, file_bytes=file_bytes)
    if head_bytes > len(buffer):
        rest = bytearray(head_bytes - len(buffer))
        _read_exactly(files, descriptor, memoryview(rest), offset=len(buffer))
        buffer += rest
    head = bytes(buffer[:head_bytes])
    if is_encrypted_header(head):
        return parse_encrypted_header(head, file_bytes=file_bytes, cipher=cipher)
    return parse_head(head, file_bytes=file_bytes)


def slices(data: memoryview) -> Iterator[memoryview]:
    """Yield a buffer in pieces that fit a group."""
    if data.nbytes <= GROUP_BYTES:
        yield data
    else:
        for begin in range(0, data.nbytes, GROUP_BYTES):
            yield data[begin : begin + GROUP_BYTES]


def groups(parts: Iterable[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield runs of parts that go through one call and one hash while they are cached, with their bytes."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Proof:
    """What proves one region."""

    checksum: int
    tag: bytes


class _Encryption:
    """One file's salt and key, and the room that its pieces are encrypted in."""

    def __init__(self, file_key: FileKey, cipher: FileCipher) -> None:
        self.file_key = file_key
        self.cipher = cipher
        self._scratch = memoryview(bytearray(2 * GROUP_BYTES))

    @classmethod
    def of(cls, block: HostBlock, cipher: Cipher | None) -> _Encryption | None:
        """Return what a new file of this block is encrypted with; None in the clear."""
        if cipher is None:
            return None
        file_key = FileKey(cipher.key_id, cipher.new_salt())
        facts = file_key.facts(BlockOutline.of(block.header))
        return cls(file_key, cipher.file(salt=file_key.salt, facts=facts))

    def encrypt(self, encryptor: Encryptor, group: Sequence[memoryview]) -> list[memoryview]:
        """Return a group's bytes, encrypted, valid until the next call."""
        begin = 0
        for part in group:
            encryptor.update(part, self._scratch[begin : begin + part.nbytes])
            begin += part.nbytes
        return [self._scratch[:begin]]


def _encode(
    block: HostBlock, regions: Sequence[FileRegion], encryption: _Encryption | None, *, begin: int
) -> tuple[bytes, int]:
    if encryption is None:
        return encode_head(block.header, regions, begin=begin)
    return encode_encrypted_header(
        block.header, regions, file_key=encryption.file_key, file_cipher=encryption.cipher, begin=begin
    )


def _describe(block: HostBlock, proofs: Sequence[_Proof], *, begin: int) -> tuple[FileRegion, ...]:
    """Return the regions of a file whose head has `begin` bytes."""
    regions = []
    offset = begin
    for region, proof in zip(block.regions, proofs, strict=True):
        tensors = []
        start = offset
        for tensor in region.tensors:
            tensors.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, offset, tensor.data.nbytes))
            offset += tensor.data.nbytes
        regions.append(
            FileRegion(region.kind, start, offset - start, proof.checksum, tuple(tensors), proof.tag)
        )
    return tuple(regions)


def _read_exactly(files: Files, descriptor: int, buffer: memoryview, *, offset: int) -> None:
    got = files.read_into(descriptor, [buffer], offset=offset)
    if got != buffer.nbytes:
        raise BlockFileError(Damage.TRUNCATED, f"{got} bytes at {offset}, where {buffer.nbytes} were due")
