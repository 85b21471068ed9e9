"""Model pool: the `Seats` of a server with several models, each loaded when a call needs it. Event loop.

Models are loaded and unloaded one at a time; their files are fetched earlier, at any time. A call for a model
that is not loaded waits; loading continues even if its caller leaves. While a model is drained for another
one, new calls for it wait too, and it is loaded again for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Generic, TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.model import EngineState, ListedModel, ModelState
from icehouse_server.errors import (
    CannotFit,
    EngineFailed,
    IcehouseError,
    Overloaded,
    Reason,
    Unavailable,
    size_text,
)
from icehouse_server.pool.places import (
    LoadedPlace,
    ModelNeeds,
    ModelOpener,
    ModelTerms,
    OpenedModel,
    PooledModel,
    shown,
    taken_bytes,
    yielding,
)
from icehouse_server.rpc.access.caller import Caller, CallerRole
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.calls.call_lifecycle import stopping
from icehouse_server.rpc.engine_client.seat import ModelUse, Seat, unknown_model

_log = logging.getLogger("icehouse.pool")

RETRY_S = 5.0
"""How long a model that could not be loaded is not tried again."""
LOADING_PATIENCE_S = 60.0
"""How long a step of the inference thread may take while it loads a model, before it looks stuck."""
GIVE_WAY_S = 60.0
"""How long a call waits for the running calls of other models, whose memory it needs, until it is refused."""


_Opened = TypeVar("_Opened", bound=OpenedModel)


class ModelPool(Generic[_Opened]):
    """Loads and unloads models. `limit_bytes` is for all models that are loaded at a time."""

    are_several = True

    def __init__(
        self,
        models: Sequence[ModelTerms],
        *,
        opener: ModelOpener[_Opened],
        clock: Clock,
        limit_bytes: int,
        grace_s: float,
    ) -> None:
        self._models = {terms.name: PooledModel(terms) for terms in models}
        self._by_name = {
            name: self._models[terms.name] for terms in models for name in (terms.name, *terms.aliases)
        }
        self._opener = opener
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._grace_s = grace_s
        self._turn = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        # A download may take an hour; other work in the event loop's own executor must not wait for one.
        self._fetchers = concurrent.futures.ThreadPoolExecutor(len(models), thread_name_prefix="model-fetch")
        self._opened: list[_Opened] = []
        """All opened models that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []
        self.default_name = models[0].name
        self.state = EngineState.LOADING
        self.ended = asyncio.Event()

    async def start(self) -> None:
        """Load the default model and the pinned ones; if none can be loaded, raises the first one's error."""
        wanted = [m for m in self._models.values() if m.terms.is_pinned or m.terms.name == self.default_name]
        errors: list[IcehouseError] = []
        for model in wanted:
            try:
                self._release(await self._loaded(model))
            except IcehouseError as error:
                errors.append(error)
        if len(errors) == len(wanted):
            raise errors[0]
        if self.state is EngineState.LOADING:
            self._set_state(EngineState.READY)

    def begin_stop(self) -> list[_Opened]:
        """Load nothing more; return the models in memory, which the caller must end."""
        self._set_state(EngineState.DRAINING)
        self.ended.set()
        self._fetchers.shutdown(wait=False)
        for task in self._tasks:
            task.cancel()
        for model in self._models.values():
            self._refuse(model, stopping())
        return list(self._opened)

    def loaded(self) -> Mapping[str, Seat]:
        return {
            name: model.place.opened.seat
            for name, model in self._models.items()
            if model.place is not None and model.state in (ModelState.READY, ModelState.DRAINING)
        }

    async def use(self, name: str, call: ModelUse) -> Seat:
        model = self._named(name, call.caller)
        if self.state is EngineState.DRAINING:
            raise stopping()
        if model.place is not None and model.state is ModelState.READY:
            place = self._taken(model.place)
        else:
            began = self._clock.monotonic()
            try:
                place = await self._loaded(model)
            except (CannotFit, Overloaded, Unavailable):
                raise
            except IcehouseError as error:
                raise _not_loaded(model, error) from error
            call.load_s = self._clock.monotonic() - began
        call.holds.callback(self._release, place)
        return place.opened.seat

    def seat_of(self, name: str, caller: Caller) -> Seat:
        model = self._named(name, caller)
        if model.place is None or model.state is not ModelState.READY:
            raise Unavailable(
                Reason.MODEL_NOT_LOADED,
                f"model {model.terms.name!r} is not loaded; a request that names it loads it",
                field="model",
                metadata={"model": model.terms.name},
            )
        return model.place.opened.seat

    def listed(self, caller: Caller) -> Sequence[ListedModel]:
        return [m.listed for m in self._models.values() if _may_use(caller, m.terms)]

    def find(self, name: str, caller: Caller) -> ListedModel:
        return self._named(name, caller).listed

    def takes(self, name: str, caller: Caller) -> bool:
        return not self._is_given_up(self._named(name, caller))

    async def fetch(self, name: str, caller: Caller) -> None:
        model = self._named(name, caller)
        if self.state is EngineState.DRAINING:
            raise stopping()
        try:
            await self._located(model)
        except CannotFit:
            raise
        except IcehouseError as error:
            raise _not_loaded(model, error, what="fetched") from error

    async def _located(self, model: PooledModel) -> ModelNeeds:
        """Return what memory a model needs, once its files are here. All who wait share one fetch."""
        fetching = model.fetching
        if fetching is None:
            fetching = self._begin(self._fetch(model), name=f"fetching of {model.terms.name}")
            model.fetching = fetching
        # A caller who leaves does not stop it half-way.
        await asyncio.wait((fetching,))
        if fetching.cancelled():
            raise stopping()
        assert model.found is not None, "fetching ends with what it found"
        if isinstance(model.found, IcehouseError):
            raise model.found
        return model.found

    async def _fetch(self, model: PooledModel) -> None:
        """Fetch a model's files. Does not hold `_turn`, because it may take an hour."""
        before = model.state
        if before in (ModelState.ABSENT, ModelState.FAILED):
            self._set(model, ModelState.FETCHING)
        try:
            model.found = await asyncio.get_running_loop().run_in_executor(
                self._fetchers, self._opener.locate, model.terms.name
            )
        except IcehouseError as error:
            if model.loading is None:
                _log.error("model_not_fetched", extra={"model": model.terms.name, "detail": error.message})
            model.found = error
        except Exception:  # nobody may believe that the files are here; `background` logs the error
            model.found = EngineFailed(Reason.ENGINE_FAILED, "fetching broke; the log says why")
            raise
        finally:
            model.fetching = None
            if model.state is ModelState.FETCHING:
                self._set(model, before if isinstance(model.found, ModelNeeds) else ModelState.ABSENT)

    async def unload(self, name: str, caller: Caller) -> ListedModel:
        model = self._named(name, caller)

        async def unload() -> None:
            async with self._turn:
                if model.place is not None:
                    await self._unload(model, model.place, grace_s=self._grace_s)

        # A caller who leaves does not stop it half-way.
        await asyncio.shield(self._begin(unload(), name=f"unloading of {model.terms.name}"))
        return model.listed

    def turns(self, *, patience_s: float) -> bool:
        ready = [m.place for m in self._models.values() if m.state is ModelState.READY and m.place]
        if any(m.state is ModelState.LOADING for m in self._models.values()):
            patience_s = max(patience_s, LOADING_PATIENCE_S)
        return self.state is EngineState.READY and all(
            place.opened.seat.turns(self._clock, patience_s=patience_s) for place in ready
        )

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _named(self, name: str, caller: Caller) -> PooledModel:
        model = self._by_name.get(name or self.default_name)
        if model is None or not _may_use(caller, model.terms):
            raise unknown_model(name, [each.name for each in self.listed(caller)])
        return model

    def _taken(self, place: LoadedPlace) -> LoadedPlace:
        place.keep()
        place.user_count += 1
        place.idle.clear()
        return place

    def _release(self, place: LoadedPlace) -> None:
        place.user_count -= 1
        place.use_time = self._clock.monotonic()
        place.released.set()
        if not place.user_count:
            place.idle.set()
            model = self._models[place.terms.name]
            if model.place is place and place.terms.ttl_s and not place.terms.is_pinned:
                expire = functools.partial(self._expire, model, place)
                place.expiry = asyncio.get_running_loop().call_later(place.terms.ttl_s, expire)

    def _expire(self, model: PooledModel, place: LoadedPlace) -> None:
        async def unload() -> None:
            async with self._turn:
                if model.place is place and place.idle.is_set() and model.state is ModelState.READY:
                    await self._unload(model, place, grace_s=0.0)

        self._begin(unload(), name=f"expiry of {model.terms.name}")

    async def _loaded(self, model: PooledModel) -> LoadedPlace:
        """Return the place of a model, marked as used, once it is loaded; raises the error if that fails."""
        if model.error is not None and self._is_given_up(model):
            raise model.error
        waiter: asyncio.Future[LoadedPlace] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        self._ensure_loading(model)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The place may have been marked as used just as the caller left.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            raise
        finally:
            if waiter in model.waiters:
                model.waiters.remove(waiter)

    def _is_given_up(self, model: PooledModel) -> bool:
        """Whether a model failed so recently that it is not tried again yet."""
        since_s = self._clock.monotonic() - model.failed_time
        return model.state is ModelState.FAILED and since_s < RETRY_S

    def _ensure_loading(self, model: PooledModel) -> None:
        if model.loading is None:
            model.loading = self._begin(self._load(model), name=f"loading of {model.terms.name}")

    async def _load(self, model: PooledModel) -> None:
        try:
            needs = await self._located(model)
            async with self._turn:
                if model.place is None:
                    await self._load_in_turn(model, needs)
                elif model.state is ModelState.READY:
                    self._admit(model, model.place)
                else:
                    raise EngineFailed(Reason.ENGINE_FAILED, "its last engine could not be ended")
        except IcehouseError as error:
            self._fail(model, error)
        except Exception:  # nobody may wait for ever, whatever broke; `background` logs the error
            self._fail(model, EngineFailed(Reason.ENGINE_FAILED, "loading broke; the server's log says why"))
            raise
        finally:
            model.loading = None

    async def _load_in_turn(self, model: PooledModel, needs: ModelNeeds) -> None:
        name, began = model.terms.name, self._clock.monotonic()
        await self._make_room(name, needs, limit_bytes=self._limit_bytes)
        place = await self._opened_place(model, needs)
        duration_s = round(self._clock.monotonic() - began, 3)
        size_bytes = place.needs.weight_bytes
        _log.info("model_loaded", extra={"model": name, "size_bytes": size_bytes, "duration_s": duration_s})
        self._admit(model, place)

    async def _opened_place(self, model: PooledModel, needs: ModelNeeds) -> LoadedPlace:
        """Load a model. If what others keep besides their weights leaves too little, they give way too."""
        while True:
            try:
                return await self._open(model, needs)
            except Overloaded:
                occupants = self._occupants()
                if all(each.terms.is_pinned for each in occupants):
                    raise
                limit_bytes = taken_bytes(needs, occupants) - 1
                await self._make_room(model.terms.name, needs, limit_bytes=limit_bytes)

    async def _open(self, model: PooledModel, needs: ModelNeeds) -> LoadedPlace:
        self._set(model, ModelState.LOADING)
        if model.ending is not None:
            # Its engine before has its memory, and its blocks on SSD.
            await asyncio.wait((model.ending,))
        began = self._clock.monotonic()
        opened = await asyncio.to_thread(self._opener.open, model.terms.name)
        router, changed = opened.seat.router, asyncio.Event()
        router.add_listener(changed.set)
        model.place = place = LoadedPlace(model.terms, opened, needs, began)
        self._opened.append(opened)
        try:
            opened.start()
        except BaseException:  # of a thread that cannot be had, for one
            await self._end(model, place)
            raise
        while router.state is EngineState.LOADING:
            changed.clear()
            await changed.wait()
        if router.state is not EngineState.READY or router.model is None:
            await self._end(model, place)
            raise opened.error or stopping()
        router.add_listener(functools.partial(self._engine_changed, model, place))
        model.info = router.model.info
        weight_bytes = max(needs.weight_bytes, model.info.resident_bytes)
        place.needs = ModelNeeds(weight_bytes, needs.run_bytes)
        place.ready_time = self._clock.monotonic()
        place.load_s = place.ready_time - began
        return place

    def _admit(self, model: PooledModel, place: LoadedPlace) -> None:
        """Let all calls that wait for a model use it."""
        self._set(model, ModelState.READY)
        # Count one user of our own, so that a model that nobody waits for any more expires too.
        self._taken(place)
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(self._taken(place))
        self._release(place)

    async def _make_room(self, name: str, needs: ModelNeeds, *, limit_bytes: int) -> None:
        """Unload the models that must give way, once they have stayed long enough. Raises CannotFit, or
        Overloaded if running calls take too long."""
        while chosen := yielding(name, needs, self._occupants(), limit_bytes=limit_bytes):
            if await self._has_stayed(chosen):
                continue  # by now another model may have to give way
            leaving = [(self._models[place.terms.name], place) for place in chosen]
            for model, _ in leaving:
                self._set(model, ModelState.DRAINING)
            try:
                async with asyncio.timeout(GIVE_WAY_S):
                    for _, place in leaving:
                        await place.idle.wait()
            except TimeoutError:
                for model, place in leaving:
                    if model.place is place:
                        self._admit(model, place)
                raise _no_room(name, needs, chosen, limit_bytes=limit_bytes) from None
            for model, place in leaving:
                if model.place is place:
                    await self._unload(model, place, grace_s=0.0)

    def _occupants(self) -> list[LoadedPlace]:
        return [model.place for model in self._models.values() if model.place is not None]

    async def _has_stayed(self, chosen: Sequence[LoadedPlace]) -> bool:
        """Wait while one of these models must not give way yet, or until a call of it has ended. Return False
        if all may go now."""
        for place in chosen:
            if stay_s := place.stay_s(self._clock.monotonic()):
                place.released.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(stay_s):
                        await place.released.wait()
                return True
        return False

    async def _unload(self, model: PooledModel, place: LoadedPlace, *, grace_s: float) -> None:
        """Unload a model once nobody uses it, or after `grace_s`. The caller holds `_turn`."""
        self._set(model, ModelState.DRAINING)
        place.keep()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await place.idle.wait()
        await self._end(model, place)
        _log.info("model_unloaded", extra={"model": model.terms.name})
        if model.state is ModelState.DRAINING:
            self._set(model, ModelState.ABSENT)
        if model.waiters:
            self._ensure_loading(model)

    async def _end(self, model: PooledModel, place: LoadedPlace) -> None:
        await place.opened.end()
        self._opened = [each for each in self._opened if each is not place.opened]
        if model.place is place:
            model.place = None

    def _engine_changed(self, model: PooledModel, place: LoadedPlace) -> None:
        """Take a model whose engine failed out of the pool; the others continue."""
        if place.opened.seat.router.state is EngineState.FAILED and model.place is place:
            model.place = None
            model.ending = self._begin(self._end(model, place), name=f"end of {model.terms.name}")
            self._fail(model, place.opened.error or EngineFailed(Reason.ENGINE_FAILED, "its engine failed"))

    def _fail(self, model: PooledModel, error: IcehouseError) -> None:
        _log.error("model_failed", extra={"model": model.terms.name, "detail": error.message})
        is_short = isinstance(error, Overloaded | CannotFit)
        if not is_short:
            model.error, model.failed_time = error, self._clock.monotonic()
        self._set(model, ModelState.ABSENT if is_short else ModelState.FAILED)
        self._refuse(model, error)

    def _refuse(self, model: PooledModel, error: IcehouseError) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _begin(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        task = background.start(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _set(self, model: PooledModel, state: ModelState) -> None:
        model.state = state
        self._tell()

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def _may_use(caller: Caller, terms: ModelTerms) -> bool:
    return not terms.tenants or caller.role is CallerRole.OPERATOR or caller.tenant in terms.tenants


def _not_loaded(model: PooledModel, error: IcehouseError, *, what: str = "loaded") -> Unavailable:
    """Return the error of a call whose model could not be loaded or fetched."""
    return Unavailable(
        Reason.MODEL_NOT_LOADED,
        f"model {model.terms.name!r} could not be {what}: {shown(error)}",
        field="model",
        retry_after_s=RETRY_S,
        metadata={"model": model.terms.name, "cause": error.reason.value},
    )


def _no_room(name: str, needs: ModelNeeds, running: Sequence[LoadedPlace], *, limit_bytes: int) -> Overloaded:
    names = ", ".join(repr(each.terms.name) for each in running)
    return Overloaded(
        Reason.MEMORY_SHORT,
        f"model {name!r} takes {size_text(needs.weight_bytes)} of the {size_text(limit_bytes)} that the "
        f"server may use, and calls of {names} did not end within {GIVE_WAY_S:g} s; try again later",
        retry_after_s=RETRY_S,
        metadata={"model": name, "weight_bytes": needs.weight_bytes, "limit_bytes": limit_bytes},
    )
