"""Archives that one life of the server exports and another imports, with the service's own code: for the same
tenant or another, in a life of the same model or not, whole or altered."""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from icehouse.v1 import cache_service_pb2 as messages
from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.domain.model import AdapterInfo
from icehouse_server.engine.core.mailbox import Command
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.services.cache_transfer import CacheTransfer
from icehouse_server.storage.local.block_format.block_bytes import BlockBytes

from tests.fixtures.engine import model_info
from tests.system.sim.ledger import Imported, Ledger
from tests.system.sim.server import SimServer
from tests.system.sim.setup import ADAPTER_DIGESTS, fingerprint

_STEP_LIMIT = 20_000
_KEPT_COUNT = 4
_TENSOR_BYTES = 24
"""Fewer bytes than the tensors of any block file have; tensors are at its end."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Archive:
    data: bytes
    file_ends: tuple[int, ...]
    """Positions after each block's file."""
    model: int
    scope: CacheScope
    prompt: TokenKeys
    """All blocks are of this prompt, in this scope."""


class ArchiveCarrier:
    """Carries archives from one life of the server to the next. `step` runs the server meanwhile."""

    def __init__(
        self, ledger: Ledger, dice: random.Random, say: Callable[[str], None], step: Callable[[], None]
    ) -> None:
        self._ledger, self._dice, self._say, self._step = ledger, dice, say, step
        self._archives: list[_Archive] = []

    def export(self, served: SimServer, prompt: TokenKeys, scope: CacheScope) -> None:
        """Export a prompt, if any of its blocks is known."""
        sink, transfer = _Sink(), _Transfer(prompts=_Prompts(), timeout_s=1.0)
        try:
            _run(transfer.export(prompt, scope, seat=self._seat(served), context=sink, timer=sink))
        except IcehouseError as error:
            self._say(f"export of {scope}: {error!r:.100}")
            return
        self._say(f"export of {scope}: {sink.result}")
        archive = _Archive(bytes(sink.data), tuple(sink.file_ends), served.life.model, scope, prompt)
        self._archives = [*self._archives[1 - _KEPT_COUNT :], archive]
        self._ledger.seen["exported blocks"] += sink.result.block_count

    def adopt(self, served: SimServer, tenant: Tenant) -> None:
        """Import an archive for this tenant; one of another model must be refused."""
        if not self._archives:
            return
        archive = self._dice.choice(self._archives)
        data = self._altered(archive) if self._dice.random() < 0.3 else archive.data
        is_ours = archive.model == served.life.model
        scope = dataclasses.replace(archive.scope, tenant=tenant)
        if is_ours:
            self._ledger.imported.append(Imported(scope, archive.model, archive.prompt))
        adopting = _Transfer(prompts=_Prompts(), timeout_s=1.0).adopt(
            _requests(data), tenant, seat=self._seat(served)
        )
        try:
            answer = _run(adopting)
        except IcehouseError as error:
            self._say(f"import as {scope}: {error!r:.100}")
            self._ledger.seen["archives of another model"] += not is_ours
            return
        self._say(f"import as {scope}: {answer}".replace("\n", " "))
        assert is_ours or data is not archive.data, "another model's archive was read to its end"
        assert answer.stop_detail or data == archive.data, "an altered archive was taken for whole"
        for other in {Tenant(""), Tenant("other")} - {tenant}:
            self._check_scope(served, archive.prompt, dataclasses.replace(scope, tenant=other))
        self._ledger.seen["adopted blocks"] += answer.adopted_block_count

    def _check_scope(self, served: SimServer, prompt: TokenKeys, scope: CacheScope) -> None:
        """Assert that a tenant has no block that it neither computed nor imported."""
        chain = served.cache.known_chain(prompt, scope)
        held = prompt[: chain[-1].end_token_index if chain else 0]
        assert self._ledger.knows(scope, served.life.model, held) or not held, f"{scope} was given {held}"

    def _altered(self, archive: _Archive) -> bytes:
        """Return an archive's bytes with one bit flipped, or cut off."""
        data = bytearray(archive.data)
        if self._dice.random() < 0.2:
            return bytes(data[: self._dice.randrange(len(data))])
        position = self._dice.randrange(len(data))
        if archive.file_ends and self._dice.random() < 0.7:
            position = self._dice.choice(archive.file_ends) - self._dice.randint(1, _TENSOR_BYTES)
        data[position] ^= 1 << self._dice.randrange(8)
        return bytes(data)

    def _seat(self, served: SimServer) -> Any:
        router = types.SimpleNamespace(require_model=lambda: _served(served))
        return types.SimpleNamespace(router=router, commands=_Commands(served, self._step))


class _Transfer(CacheTransfer):
    """Works without an event loop: nothing here waits for time to pass."""

    async def patiently(self, commands: Any, command: Any, answer_type: Any, **_: Any) -> Any:
        return await commands.ask(command, answer_type)

    async def next_of(self, requests: AsyncIterator[Any]) -> Any:
        return await anext(requests, None)


class _Commands:
    """Stands for `EngineCache`: steps the server until it has answered."""

    def __init__(self, served: SimServer, step: Callable[[], None]) -> None:
        self._served, self._step = served, step

    async def ask(self, command: CacheCommand, answer_type: type[T]) -> T:
        answers: list[CacheAnswer | IcehouseError] = []
        self._served.mailbox.post(Command(command, answers.append))
        for _ in range(_STEP_LIMIT):
            if answers:
                break
            self._step()
        assert len(answers) == 1, f"{command} was answered {len(answers)} times"
        (answer,) = answers
        if isinstance(answer, IcehouseError):
            raise answer
        assert isinstance(answer, answer_type), answer
        return answer


class _Prompts:
    """Stands for `PromptReader`, on the caller's thread."""

    async def run(self, work: Callable[[], T]) -> T:
        return work()


class _Sink:
    """A caller's stream and its timer."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.file_ends: list[int] = []
        self.result = messages.ExportResult()

    async def write(self, context: object, message: messages.ExportResponse) -> None:
        if message.WhichOneof("event") == "done":
            self.result = message.done
            return
        if message.chunk.startswith(b"E"):
            self.file_ends.append(len(self.data))
        self.data += message.chunk


async def _requests(data: bytes) -> AsyncIterator[messages.ImportRequest]:
    yield messages.ImportRequest(chunk=data)


def _served(served: SimServer) -> ServedModel:
    """Return this life's model as the event loop knows it."""
    info = dataclasses.replace(
        model_info(),
        fingerprint_hex=fingerprint(served.life.model).hex(),
        adapters=tuple(AdapterInfo(name, "lora", digest, 0, 0) for name, digest in ADAPTER_DIGESTS.items()),
    )
    return ServedModel(info, tokenizer=None, block_files=BlockBytes() if served.storage else None)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")
