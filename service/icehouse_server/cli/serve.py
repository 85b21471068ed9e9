"""`icehouse serve`: start the server, report its progress, drain it on a signal.

Start: model folder, tokenizer, address, engine. Whether the address and the cache directory are free is
checked first, so that a used one is reported at once. The address is bound before the model is loaded; health
stays NOT_SERVING until the model is warm. Stop: no new calls, running ones finish within the grace, then the
engine's thread ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import uvloop

from icehouse_server import heap
from icehouse_server.bootstrap.cache_parts import check_directory, open_ssd
from icehouse_server.bootstrap.composition import EngineParts, OpenedEngine, Server, build_server
from icehouse_server.bootstrap.follower_parts import follow
from icehouse_server.bootstrap.group.leading import own_membership
from icehouse_server.bootstrap.kept_models import held
from icehouse_server.bootstrap.machine import (
    allow_open_files,
    freeze_objects,
    give_back_large_arrays,
    memory_limit,
    wanted_file_count,
    weights_dtype,
)
from icehouse_server.bootstrap.model_source import ServedModels, check_adapters, locate_models
from icehouse_server.bootstrap.pool_parts import build_pool
from icehouse_server.bootstrap.preflight import check_settings
from icehouse_server.bootstrap.room import MachineResources
from icehouse_server.cli.http_child import LAST_WORDS_S, HttpChild, http_child
from icehouse_server.cli.service.stop_bounds import BOUNDS
from icehouse_server.cli.terminal.build_progress import build_progress
from icehouse_server.cli.terminal.raised_signals import signals_raised
from icehouse_server.clock import Clock, SystemClock
from icehouse_server.config import Config, LoadedConfig
from icehouse_server.config.load import environment
from icehouse_server.device import Device, find_device
from icehouse_server.domain.model import EngineState
from icehouse_server.errors import EngineFailed, IcehouseError, Reason
from icehouse_server.group.ending import leave
from icehouse_server.group.membership import Membership
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.rpc.access.caller import UNPROVED
from icehouse_server.rpc.engine_client.router import Router

_log = logging.getLogger("icehouse.boot")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_LOOK_S = 0.02
_LOOP_THREADS = "event_loop"
"""Name of the event loop executor's threads; each event loop implementation uses another one."""


def serve(loaded: LoadedConfig) -> None:
    """Serve until a signal. Raises IcehouseError if the server cannot start or its engine dies."""
    device = find_device()
    if not device.is_gpu:
        heap.keep_freed()
    give_back_large_arrays()
    _allow_open_files(loaded.config)
    membership = own_membership(loaded.config)
    if membership is not None and membership.rank:
        _follow(loaded.config, SystemClock(), device, membership)
    # uvloop is woken without releasing the interpreter's lock, and each message costs less.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        manager = manager_of(environment(), pid=os.getpid())
        runner.run(_serve(loaded.config, SystemClock(), manager, device, membership))
    if membership is not None:
        leave(0)


def _follow(config: Config, clock: Clock, device: Device, membership: Membership) -> NoReturn:
    """Run a rank of a group other than the first. Raises IcehouseError."""
    check_adapters(config.model)
    check_directory(config.cache)
    ssd = open_ssd(config, device=device, clock=clock)
    models = _located(config, device, Narrator(clock), membership)
    with held(*models.folders):
        follow(config, membership, models=models, ssd=ssd, device=device, clock=clock)


def _allow_open_files(config: Config) -> None:
    port_count = 1 + len(config.worker_ports)
    wanted = wanted_file_count(connection_limit=port_count * config.connection.connection_limit)
    allowed = allow_open_files(wanted)
    if allowed >= wanted:
        _log.info("open_files_allowed", extra={"limit": allowed})
        return
    detail = "raise the hard limit of open files (ulimit -Hn), or set a lower connection.connection_limit"
    _log.warning("open_files_short", extra={"limit": allowed, "wanted": wanted, "detail": detail})


async def _serve(
    config: Config,
    clock: Clock,
    manager: ServiceManager,
    device: Device,
    membership: Membership | None = None,
) -> None:
    _name_loop_threads()
    narrator = Narrator(clock)
    check_settings(config)
    with signals_raised(signal.SIGTERM, code=0):  # until they are heard
        async with http_child(config) as front:
            with contextlib.ExitStack() as stack:
                server = _built(config, clock, device, narrator, stack, membership)
                await _run(server, config, front, manager=manager, narrator=narrator)
    opened = server.opened
    lost = None if server.leader is None else server.leader.lost
    has_failed = lost is not None or (opened is not None and opened.router.state is EngineState.FAILED)
    await _leave_stuck_work(1 if has_failed else 0)
    _bound_end(1 if has_failed else 0)
    if opened is not None and has_failed:
        raise lost or opened.error or EngineFailed(Reason.ENGINE_FAILED, "the engine failed; see the log")


def _built(
    config: Config,
    clock: Clock,
    device: Device,
    narrator: Narrator,
    stack: contextlib.ExitStack,
    membership: Membership | None,
) -> Server:
    """Return the wired server; `stack` holds what it needs. Raises IcehouseError."""
    if config.models:
        return build_pool(config, device=device, clock=clock)
    parts = EngineParts.of(config, device, clock)
    models = _located(config, device, narrator, membership)
    stack.enter_context(held(*models.folders))
    router = Router(asyncio.get_running_loop())
    with narrator.phase("tokenizer_read"):
        return build_server(
            config,
            parts,
            model=models.model,
            draft=models.draft,
            router=router,
            membership=membership,
        )


def _located(
    config: Config, device: Device, narrator: Narrator, membership: Membership | None
) -> ServedModels:
    """Return the models; raises IcehouseError, for lack of room before any download."""
    world = 1 if membership is None else membership.world
    room = MachineResources(memory_limit_bytes=world * memory_limit(config.engine.memory_limit_bytes, device))
    with narrator.phase("model_found") as fields, build_progress() as on_progress:
        dtype = weights_dtype(config.model, device)
        models = locate_models(config.model, on_progress=on_progress, on_size=room.check, dtype=dtype)
        fields.update(model=models.model.model_id, path=models.model.path)
        if models.draft is not None:
            fields.update(draft_model=models.draft.model_id, draft_path=models.draft.path)
        fields.update(size_bytes=room.weight_bytes)
    return models


async def _run(
    server: Server, config: Config, front: HttpChild | None, *, manager: ServiceManager, narrator: Narrator
) -> None:
    """Start the parts, serve until a signal or the engine's end, and drain. Raises IcehouseError at the
    start."""
    stop_signal = _listen_for_signals()
    address = await server.rpc.start(private_socket=None if front is None else front.private_socket)
    try:
        server.telemetry.start(server.rpc, server.clock)
        own = server.rpc.worker_addresses
        for model, worker_address in own.items():
            _log.info("worker_opened", extra={"model": model, "address": worker_address})
        server.kv_events.start(lambda model: own.get(model, address))
        if server.leader is not None:
            server.leader.listen()
        _open_storage(server, config, narrator)
    except IcehouseError:
        server.telemetry.stop()
        await server.rpc.stop(grace_s=0)
        await server.kv_events.stop()
        raise
    server.inference.start()
    addresses = {"address": address} if front is None else {"address": address, "http": front.url}
    try:
        names = await _has_begun(server, stop_signal, narrator, addresses)
        if names:
            manager.ready(f"serving {', '.join(names)} on {' and '.join(addresses.values())}")
            async with manager.watched(lambda: server.rpc.health.is_serving):
                if server.opened is None:
                    await stop_signal.wait()
                else:
                    await _until(server.opened.router, EngineState.STOPPED, stop_signal)
    finally:
        manager.stopping()
        await _drain(server, grace_s=config.server.drain_grace_s, narrator=narrator, front=front)


def _open_storage(server: Server, config: Config, narrator: Narrator) -> None:
    """Lock the cache directory; raises StartError that names its owner if another process has it."""
    if server.tiers is None:
        return
    with narrator.phase("cache_lock_acquired") as fields:
        if server.opened is not None and server.opened.storage is not None:
            server.opened.storage.start()
        server.tiers.start()
        fields.update(directory=config.cache.block_directory)


class Narrator:
    """Logs each phase of the start with its duration."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_time = clock.monotonic()

    @property
    def total_s(self) -> float:
        return self._clock.monotonic() - self._start_time

    @contextlib.contextmanager
    def phase(self, event: str) -> Iterator[dict[str, object]]:
        """Log `event` with its duration and the yielded fields if the block succeeds."""
        began = self._clock.monotonic()
        fields: dict[str, object] = {}
        yield fields
        _log.info(event, extra={**fields, "duration_s": round(self._clock.monotonic() - began, 3)})


def _listen_for_signals() -> asyncio.Event:
    """Return an event that the first signal sets; the second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        _log.info("drain_started", extra={"signal": number.name, "detail": "a second signal ends at once"})
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _has_begun(
    server: Server, stop: asyncio.Event, narrator: Narrator, addresses: Mapping[str, str]
) -> Sequence[str]:
    """Wait for what is loaded at the start; return the served names, or none if loading failed or `stop` was
    set first."""
    names = await _pool_names(server.pool, stop) if server.pool else await _only_name(server, stop, narrator)
    if names:
        _log.info(
            "serving_started", extra={**addresses, "model": ", ".join(names), "boot_s": narrator.total_s}
        )
    return names


async def _only_name(server: Server, stop: asyncio.Event, narrator: Narrator) -> Sequence[str]:
    start_s, router = narrator.total_s, server.only.router
    server.only.engine.start()
    await _until(router, EngineState.READY, stop)
    if router.state is not EngineState.READY or router.model is None:
        return ()
    info = router.model.info
    _freeze()
    _log.info(
        "model_loaded",
        extra={
            "parameters": info.parameter_count,
            "dtype": info.dtype,
            "device": info.device,
            "duration_s": round(narrator.total_s - start_s, 3),
        },
    )
    return (info.model_id,)


def _freeze() -> None:
    _log.debug("objects_frozen", extra={"count": freeze_objects()})


async def _pool_names(pool: ModelPool[OpenedEngine], stop: asyncio.Event) -> Sequence[str]:
    """Return the served names; raises IcehouseError if all models to load at the start failed to load."""
    # Before any model is loaded: frozen objects in reference cycles are never freed.
    _freeze()
    starting, stopping = asyncio.create_task(pool.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return ()
        starting.result()
    finally:
        starting.cancel()
        stopping.cancel()
    return [model.name for model in pool.listed(UNPROVED)]


async def _until(router: Router, state: EngineState, stop: asyncio.Event) -> None:
    """Return when the engine reaches `state` or FAILED, or `stop` is set."""
    changed = asyncio.Event()
    router.add_listener(changed.set)
    stopping = asyncio.create_task(stop.wait())
    try:
        while router.state not in (state, EngineState.FAILED) and not stop.is_set():
            changed.clear()
            changing = asyncio.create_task(changed.wait())
            await asyncio.wait((changing, stopping), return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
    finally:
        stopping.cancel()


async def _drain(
    server: Server, *, grace_s: float, narrator: Narrator, front: HttpChild | None = None
) -> None:
    opened = server.begin_stop()
    flush_s = max((each.engine.flush_timeout_s for each in opened), default=0.0)
    ending_s = BOUNDS.engine_s(grace_s=grace_s, flush_timeout_s=flush_s)
    closing_s = BOUNDS.close_s + BOUNDS.closed_s
    with narrator.phase("server_drained"):
        ending_time = server.clock.monotonic() + ending_s
        for each in opened:
            each.engine.drain(grace_s=grace_s)
        server.inference.end()
        async with _abandoned("calls", timeout_s=grace_s + BOUNDS.edge_s):
            if front is not None:
                front.begin_stop()
            # The engine ends calls that do not finish in time, so the edge waits until it has reported that.
            await server.rpc.stop(grace_s=grace_s + 1)
            await server.kv_events.stop()
            if front is not None:
                await front.stop(timeout_s=LAST_WORDS_S)
        for each in opened:
            each.seat.close()
        left_s = max(0.0, ending_time - server.clock.monotonic())
        ended = await asyncio.to_thread(server.inference.join, timeout_s=left_s)
        if server.leader is not None:
            await asyncio.to_thread(server.leader.stop)
        closed = await asyncio.to_thread(_closed, server, opened, timeout_s=closing_s)
        async with _abandoned("telemetry", timeout_s=BOUNDS.telemetry_s):
            await asyncio.to_thread(server.telemetry.stop)
    if not ended:
        _log.error("stuck_inference_abandoned", extra={"waited_s": ending_s})
    if not closed:
        _log.error("stuck_storage_abandoned", extra={"waited_s": closing_s})
    if not (ended and closed):
        leave(1)


def _closed(server: Server, opened: Sequence[OpenedEngine], *, timeout_s: float) -> bool:
    """Close the SSD tiers; return whether all closed in time."""
    if server.tiers is None:
        return True
    deadline_time = server.clock.monotonic() + BOUNDS.close_s
    tiers = [each.storage for each in opened if each.storage is not None]
    for tier in tiers:
        tier.close(deadline_time=deadline_time)
    server.tiers.close(deadline_time=deadline_time)
    is_closed = server.tiers.join(timeout_s=timeout_s)
    return is_closed and all(tier.join(timeout_s=0) for tier in tiers)


@contextlib.asynccontextmanager
async def _abandoned(what: str, *, timeout_s: float) -> AsyncIterator[None]:
    """Stop waiting for the block after `timeout_s`, and log that."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        _log.error(f"stuck_{what}_abandoned", extra={"waited_s": timeout_s})


async def _leave_stuck_work(code: int) -> None:
    """End the process if work goes on that nothing can stop: Python would wait for it forever."""
    names: list[str] = []
    # Count turns, not seconds: reading a vocabulary holds Python's lock, and then this gets no turn.
    for _ in range(round(BOUNDS.work_s / _LOOK_S)):
        names = [thread.name for thread in threading.enumerate() if _is_waited_for(thread)]
        if not names:
            return
        await asyncio.sleep(_LOOK_S)
    _log.error("stuck_work_abandoned", extra={"threads": ", ".join(names), "waited_s": BOUNDS.work_s})
    leave(code)


def _bound_end(code: int) -> None:
    """Have the process end soon, whatever closing the event loop and gRPC's own teardown wait for."""

    def abandon() -> None:
        _log.error("stuck_end_abandoned", extra={"waited_s": BOUNDS.end_s})
        leave(code)

    timer = threading.Timer(BOUNDS.end_s, abandon)
    timer.daemon = True
    timer.start()


def _name_loop_threads() -> None:
    executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix=_LOOP_THREADS)
    asyncio.get_running_loop().set_default_executor(executor)


def _is_waited_for(thread: threading.Thread) -> bool:
    # The loop's own threads have finished their work; the loop waits for them when it closes.
    is_own = thread is threading.main_thread() or thread.name.startswith(_LOOP_THREADS)
    return not thread.daemon and not is_own


_manager_log = logging.getLogger("icehouse.service_manager")

_SEND_TIMEOUT_S = 1.0
"""How long the event loop waits for a manager that does not read. Then the message is dropped."""

_PINGS_PER_INTERVAL = 4
"""Pings within the time after which systemd considers the server stuck."""


class ServiceManager:
    """Notifies systemd when the server is ready, when it stops, and that it is alive. Owned by the event
    loop.

    A message is one datagram to the socket that NOTIFY_SOCKET names (sd_notify(3)); without that variable
    nothing is sent. If a manager cannot be reached, the log says so and the server continues.
    """

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        self._address = address
        self._ping_interval_s = None if watchdog_s is None else watchdog_s / _PINGS_PER_INTERVAL

    def ready(self, status: str) -> None:
        """Say that the server is ready; `status` is shown to people."""
        self._send("READY=1", f"STATUS={' '.join(status.split())}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=finishing running calls and writing RAM's blocks to SSD")

    def ping(self, is_alive: Callable[[], bool]) -> None:
        """Say that the server is alive. If it is not, send nothing, so that it is restarted."""
        if is_alive():
            self._send("WATCHDOG=1")
        else:
            _manager_log.warning(
                "watchdog_ping_withheld", extra={"detail": "the inference thread is stuck or in a long step"}
            )

    @contextlib.asynccontextmanager
    async def watched(self, is_alive: Callable[[], bool]) -> AsyncIterator[None]:
        """Ping while the block runs, if the manager has a watchdog."""
        if self._address is None or self._ping_interval_s is None:
            yield
            return
        pinging = asyncio.create_task(self._ping_for_ever(is_alive, self._ping_interval_s))
        try:
            yield
        finally:
            pinging.cancel()

    async def _ping_for_ever(self, is_alive: Callable[[], bool], interval_s: float) -> None:
        while True:
            self.ping(is_alive)
            await asyncio.sleep(interval_s)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # A name that begins with @ is an abstract socket: its first byte is zero (unix(7)).
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(errors="replace"), address)
        except OSError as error:
            _manager_log.warning(
                "service_manager_unreachable", extra={"unsent": lines[0], "detail": str(error)}
            )


def manager_of(environ: Mapping[str, str], *, pid: int) -> ServiceManager:
    """Return the manager that started process `pid` with this environment, as sd_watchdog_enabled(3)."""
    address = environ.get("NOTIFY_SOCKET") or None
    if address is not None and not address.startswith(("/", "@")):
        _manager_log.warning("service_manager_unreachable", extra={"detail": f"NOTIFY_SOCKET is {address!r}"})
        address = None
    interval_us = environ.get("WATCHDOG_USEC", "")
    is_for_us = environ.get("WATCHDOG_PID") in (None, "", str(pid))
    # No interval has more digits, and Python refuses to convert thousands of them.
    is_number = interval_us.isascii() and interval_us.isdigit() and len(interval_us) < 20
    watchdog_s = int(interval_us) / 1e6 if is_for_us and is_number else 0.0
    return ServiceManager(address, watchdog_s=watchdog_s or None)
