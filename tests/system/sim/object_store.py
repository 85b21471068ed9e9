"""An object store for stories: it forgets, refuses, does not answer, and lies, by dice of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator

from icehouse_server.storage.shared.object_store import StoreError

from tests.fixtures.storage.object_store import MemoryStore

_FAILURE_SHARE = 0.1
_LIE_SHARE = 0.3


class FickleStore(MemoryStore):
    """Every request may fail; what is read may be another object, or a part of it."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    async def read(self, name: str) -> AsyncGenerator[memoryview]:
        await self._begin()
        data = self.objects.get(name, b"")
        if data and self._dice.random() < _LIE_SHARE:
            other = self.objects[self._dice.choice(sorted(self.objects))]
            data = self._dice.choice((other, data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1])))
        if data:
            yield memoryview(data)

    async def _begin(self) -> None:
        await super()._begin()
        if self._dice.random() < _FAILURE_SHARE:
            if self._dice.random() < 0.5:
                raise TimeoutError
            raise StoreError("the object store refuses")
