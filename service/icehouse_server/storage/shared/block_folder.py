"""Block folder: the local files that go to the object store and those that come from it."""

from __future__ import annotations

from icehouse_server.domain.blocks import Damage
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.files import Files, opened, remove
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.store_paths import StorePaths


class BlockFolder:
    """The served model's block files on this server, by name. Any thread; every method may take long."""

    def __init__(
        self, files: Files, paths: StorePaths, *, fingerprint: Fingerprint, cipher: Cipher | None
    ) -> None:
        self._files = files
        self._paths = paths
        self.fingerprint = fingerprint
        self.cipher = cipher

    def object_name(self, name: BlockHash) -> str:
        """Return a block's name in the store. The fingerprint and the block's name stand for all that its
        KV depends on; under a key both also depend on that."""
        return f"{self.fingerprint.hex()}/{name.hex()}"

    def read(self, name: BlockHash) -> tuple[BlockFile, bytes]:
        """Return a sound block's facts and its file. Raises `BlockFileError` or `OSError`."""
        path = self._paths.block(self.fingerprint, name)
        file = self._sound(path, name)
        data = bytearray(file.file_bytes)
        with opened(self._files, path) as descriptor:
            got = self._files.read_into(descriptor, [memoryview(data)], offset=0)
        if got != len(data):
            raise BlockFileError(Damage.TRUNCATED, f"{path} became shorter while it was read")
        return file, bytes(data)

    def create(self, name: BlockHash) -> tuple[str, int]:
        """Return path and descriptor of a new file for a block that is fetched. Raises `OSError`."""
        path = self._paths.fetched(self.fingerprint, name)
        remove(self._files, path)
        return path, self._files.create(path)

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self._files.write(descriptor, [data], offset=offset)

    def close(self, descriptor: int) -> None:
        self._files.close(descriptor)

    def finish(self, descriptor: int, path: str, name: BlockHash) -> BlockFile:
        """Make a fetched file durable and return its facts, every byte checked. Raises `BlockFileError`
        where it is not the block of this name, whole and sound; `OSError`."""
        try:
            self._files.fsync(descriptor)
        finally:
            self._files.close(descriptor)
        return self._sound(path, name)

    def remove(self, path: str) -> None:
        """Remove a fetched file; one that is gone is fine. Raises `OSError`."""
        remove(self._files, path)

    def _sound(self, path: str, name: BlockHash) -> BlockFile:
        file = verify_block(self._files, path, cipher=self.cipher)
        if file.header is None or (file.cipher is None) != (self.cipher is None):
            raise BlockFileError(Damage.AUTH_TAG, f"{path} is not encrypted under the key in use")
        if (file.outline.fingerprint, file.outline.hash) != (self.fingerprint, name):
            raise BlockFileError(Damage.MISMATCH, f"{path} holds another block than its name says")
        return file
