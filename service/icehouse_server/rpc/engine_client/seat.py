"""Seat: what one loaded model has on the event loop, and the port to all loaded models."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.model import EngineState, ListedModel
from icehouse_server.domain.stats import EngineStats
from icehouse_server.errors import NotFound, Reason, clipped
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.access.shares import RateLimit, retrieve_error
from icehouse_server.rpc.engine_client.engine_cache import EngineCache
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.grammars import GrammarCompilers
from icehouse_server.rpc.engine_client.prefetcher import Prefetcher
from icehouse_server.rpc.engine_client.router import Router

_SHOWN_LIMIT = 80
"""Characters shown of a caller's name for a model."""
_LISTED_LIMIT = 16


class Seat:
    """One model's engine, and what sends it commands. Owned by the event loop."""

    def __init__(self, *, engine: EnginePort, router: Router, grammars: GrammarCompilers) -> None:
        self.engine = engine
        self.router = router
        self.grammars = grammars
        self.commands = EngineCache(engine=engine, router=router)
        self.counters = CounterReader(engine=engine, router=router)
        self.prefetcher = Prefetcher(engine=engine, router=router)

    def turns(self, clock: Clock, *, patience_s: float) -> bool:
        """Whether the engine is ready and its loop turns, or is in a step that is not too long yet."""
        allowed_s = max(patience_s, self.engine.step_allowance_s)
        is_ready = self.router.state is EngineState.READY
        return is_ready and clock.monotonic() - self.engine.heartbeat_time <= allowed_s

    def close(self) -> None:
        """End prefetching and compiling."""
        self.prefetcher.close()
        self.grammars.close()


Counters = tuple[EngineStats, CacheStats | None]

PATIENCE_S = 1.0
"""How long an answer of the engine may take, so that nobody waits forever for a lost one."""
_RATE_PER_S = 20.0
_BURST_COUNT = 64


class CounterReader:
    """Shares one answer of the engine among all who ask meanwhile, and limits the rate: counting takes longer
    the more blocks there are, on threads that everybody waits for."""

    def __init__(self, *, engine: EnginePort, router: Router) -> None:
        self._engine = engine
        self._router = router
        self._asking: asyncio.Future[Counters] | None = None
        self._next: asyncio.Future[Counters] | None = None
        self._rate_limit = RateLimit(rate_per_s=_RATE_PER_S, burst_count=_BURST_COUNT)

    async def ask(self) -> Counters:
        """Return the engine's next counters; raises Unavailable or EngineFailed if it does not run."""
        self._router.require_model()
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask_after(self._asking))
            self._next.add_done_callback(retrieve_error)
        return await asyncio.shield(self._next)

    async def _ask_after(self, before: asyncio.Future[Counters] | None) -> Counters:
        if before is not None:
            await asyncio.wait((before,), timeout=PATIENCE_S)
        # A burst at once, then at a limited rate.
        now = asyncio.get_running_loop().time()
        if delay_s := self._rate_limit.delay_s("", now=now, longest_s=math.inf):
            await asyncio.sleep(delay_s)
        self._asking, self._next = self._next, None
        send = self._engine.request_stats
        return await self._router.ask(lambda reply: send(lambda engine, cache: reply((engine, cache))))


def unknown_model(name: str, served: Sequence[str]) -> NotFound:
    """Return the error for a name that no served model has, or none that the caller may use."""
    names = " or ".join(map(repr, served[:_LISTED_LIMIT])) or "another server"
    return NotFound(
        Reason.MODEL_NOT_FOUND,
        f"model {clipped(repr(name), _SHOWN_LIMIT)} is not served here; use {names} or leave `model` empty",
        field="model",
        metadata={"model": name, "served_model": ", ".join(served[:_LISTED_LIMIT])},
    )


class ModelUse(Protocol):
    """A call, as the model that it uses sees it."""

    @property
    def caller(self) -> Caller: ...
    @property
    def holds(self) -> contextlib.ExitStack:
        """Closed when the call ends."""

    load_s: float
    """How long the call waited for the model to load."""


class Seats(Protocol):
    """The seats of a server, for its services. On the event loop."""

    ended: asyncio.Event
    """Set when nothing more is served, for good."""

    @property
    def state(self) -> EngineState:
        """Whether the server accepts calls."""

    @property
    def are_several(self) -> bool:
        """Whether there may be more than one."""

    @property
    def default_name(self) -> str:
        """The name of the default model, as in `loaded`."""

    def loaded(self) -> Mapping[str, Seat]:
        """Return the seats that have an engine, by model name."""

    async def use(self, name: str, call: ModelUse) -> Seat:
        """Return the seat of the model that a call names, loading it first if need be, and keep it loaded for
        the call.

        Raises NotFound for a name that the caller may not use, and the reason why the model cannot be loaded.
        """

    def seat_of(self, name: str, caller: Caller) -> Seat:
        """Return a model's seat if it is loaded; raises NotFound as `use`, otherwise Unavailable."""

    async def fetch(self, name: str, caller: Caller) -> None:
        """Fetch a model's files without loading it; raises NotFound, and why they cannot be had."""

    async def unload(self, name: str, caller: Caller) -> ListedModel:
        """Unload a model after its calls have ended or their grace period is over; raises NotFound, and
        InvalidRequest for the only model."""

    def listed(self, caller: Caller) -> Sequence[ListedModel]:
        """Return the models that a caller may use; raises Unavailable while the only model loads."""

    def find(self, name: str, caller: Caller) -> ListedModel:
        """Return the model that a caller names; raises as `listed`, and NotFound as `use`."""

    def takes(self, name: str, caller: Caller) -> bool:
        """Whether a call for the named model would be tried now: it is loaded or would be loaded. Raises as
        `find`."""

    def turns(self, *, patience_s: float) -> bool:
        """Whether the server accepts calls and no engine has been stuck for longer than `patience_s`."""

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when `turns` or `listed` may have changed."""
