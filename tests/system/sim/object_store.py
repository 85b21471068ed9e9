"""An object store for stories: slow, forgetful, refusing, silent, and lying, with its own dice.

It uses the time of the caller's event loop.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.shared.object_store import StoreError

from tests.fixtures.storage.object_store import MemoryStore

_FAILURE_SHARE = 0.04
_LIE_SHARE = 0.2
_LOSS_SHARE = 0.03
_NEVER_S = 1e9
_FATES = ("kept",) * 20 + ("lost", "torn", "altered")


class FickleStore(MemoryStore):
    """Requests may take long or fail, objects may vanish, and what is put or read may be another object, a
    part of one, or wrong. Checks that servers put only sound objects."""

    def __init__(self, dice: random.Random, cipher: Cipher | None) -> None:
        super().__init__()
        self._dice, self._cipher = dice, cipher
        self.complaints: list[str] = []
        """Faults of objects that servers have put; the story checks that there are none."""

    async def read(self, name: str) -> AsyncGenerator[memoryview]:
        await self._begin()
        data = self.objects.get(name, b"")
        if data and self._dice.random() < _LIE_SHARE:
            other = self.objects[self._dice.choice(sorted(self.objects))]
            data = self._dice.choice((other, data[: len(data) // 2], _altered(data)))
        if data:
            yield memoryview(data)

    async def put(self, name: str, data: bytes, *, replaces: bool) -> bool:
        self._check(name, data)
        is_new = await super().put(name, data, replaces=replaces)
        fate = self._dice.choice(_FATES)
        if is_new and fate == "lost":
            self.objects.pop(name, None)
        elif is_new and fate != "kept":
            self.objects[name] = data[: len(data) // 2] if fate == "torn" else _altered(data)
        return is_new

    def _check(self, name: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(data)
            try:
                outline = verify_block(Files(), file.name, cipher=self._cipher).outline
            except Exception as error:
                self.complaints.append(f"{name} is no sound block: {error}")
                return
        if name != f"{outline.fingerprint.hex()}/{outline.hash.hex()}":
            self.complaints.append(f"{name} is another block, {outline.hash.hex()}")
        if self._cipher is not None and b"token_ids" in data:
            self.complaints.append(f"{name} is not encrypted")

    async def _begin(self) -> None:
        await super()._begin()
        for _ in range(self._dice.choice((0, 0, 0, 1, 6))):
            await asyncio.sleep(0)
        if self._dice.random() < _LOSS_SHARE:
            await asyncio.sleep(self._dice.choice((0.05, 0.7)))
        if self.objects and self._dice.random() < _LOSS_SHARE:
            del self.objects[self._dice.choice(sorted(self.objects))]
        if self._dice.random() < _FAILURE_SHARE:
            if self._dice.random() < 0.5:
                await asyncio.sleep(_NEVER_S)
            raise StoreError("the object store refuses")


def _altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
