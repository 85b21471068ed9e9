"""A server ends though work goes on that nothing can stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2
from icehouse_server.bootstrap.cache_parts import check_directory
from icehouse_server.bootstrap.telemetry import TelemetryParts
from icehouse_server.cli import serve
from icehouse_server.cli.serve import ServiceManager
from icehouse_server.cli.service.stop_bounds import BOUNDS
from icehouse_server.clock import SystemClock
from icehouse_server.config import CacheConfig, Config, ConnectionConfig, load_config
from icehouse_server.device import find_device
from icehouse_server.domain.model import EngineState
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.errors import Reason, StartError
from icehouse_server.rpc.access.credentials import ServerSecurity
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.forked import run_forked
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import MODEL_INFO, FakeTokenizer
from tests.fixtures.whole_server import whole_server

_STUCK = """
import asyncio, concurrent.futures, dataclasses, logging, threading
from icehouse_server.cli import serve

logging.basicConfig(level=logging.INFO, format="%(message)s %(threads)s")
serve.BOUNDS = dataclasses.replace(serve.BOUNDS, work_s=0.1)
if {is_stuck}:
    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="tokenizer").submit(threading.Event().wait)
asyncio.run(serve._leave_stuck_work({code}))
"""


@pytest.mark.parametrize(("is_stuck", "code", "expected"), [(True, 0, 0), (True, 1, 1), (False, 1, 0)])
def test_stuck_work_does_not_keep_the_process(
    tmp_path: Path, is_stuck: bool, code: int, expected: int
) -> None:
    output = tmp_path / "output"
    assert run_forked(_STUCK.format(is_stuck=is_stuck, code=code), output) == expected, output.read_text()
    assert ("stuck_work_abandoned tokenizer_0" in output.read_text()) is is_stuck


_KEEPS_THE_LOCK = """
import asyncio, concurrent.futures, ctypes, dataclasses, logging
from icehouse_server.cli import serve

logging.basicConfig(level=logging.INFO, format="%(message)s %(threads)s")
serve.BOUNDS = dataclasses.replace(serve.BOUNDS, work_s=0.5)

async def ends() -> None:
    reading = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="grammar-0")
    # Of a library that is called without giving Python's lock away.
    reading.submit(ctypes.PyDLL(None).usleep, 600_000)
    reading.shutdown(wait=False)
    await serve._leave_stuck_work(1)

asyncio.run(ends())
"""


def test_work_that_keeps_pythons_lock_and_ends_is_not_stuck() -> None:
    boot = f"import sys; sys.path[:] = {[*filter(None, sys.path)]!r}\n{_KEEPS_THE_LOCK}"
    ended = subprocess.run([sys.executable, "-c", boot], timeout=BOUND_S, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


_LOOPS_OWN_WORK = """
import asyncio, logging, uvloop
from icehouse_server.cli import serve

logging.basicConfig(level=logging.INFO, format="%(message)s %(threads)s")

async def ends() -> None:
    serve._name_loop_threads()
    await asyncio.to_thread(int)
    await serve._leave_stuck_work(1)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(ends())
"""


def test_idle_threads_of_the_event_loop_are_no_stuck_work(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert (run_forked(_LOOPS_OWN_WORK, output), output.read_text()) == (0, "")


_ENDLESS = """
import asyncio, dataclasses, logging, sys
from icehouse_server.cli import serve

logging.basicConfig(level=logging.INFO, format="%(message)s")
serve.BOUNDS = dataclasses.replace(serve.BOUNDS, end_s=0.1)

async def stays() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

async def main() -> None:
    task = asyncio.create_task(stays())
    await asyncio.sleep(0)
    serve._bound_end(3)

asyncio.run(main())
"""


def test_a_task_that_cannot_be_cancelled_does_not_keep_the_process(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert run_forked(_ENDLESS, output) == 3
    assert "stuck_end_abandoned" in output.read_text()


@pytest.mark.parametrize(
    ("state", "is_stopped", "lines"),
    [
        (EngineState.READY, False, ["model_loaded", "serving_started"]),
        (EngineState.FAILED, False, []),
        (EngineState.LOADING, True, []),
    ],
)
async def test_the_log_says_that_a_model_is_served_only_where_it_is(
    state: EngineState, is_stopped: bool, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    router, stop = Router(asyncio.get_running_loop()), asyncio.Event()
    if state is EngineState.READY:
        router.model_loaded(ServedModel(MODEL_INFO, FakeTokenizer()))
    router.state_changed(state, None)
    if is_stopped:
        stop.set()
    engine = types.SimpleNamespace(start=lambda: None)
    gc.unfreeze()
    with caplog.at_level(logging.INFO, "icehouse.boot"):
        async with asyncio.timeout(BOUND_S):
            server: Any = types.SimpleNamespace(
                pool=None, only=types.SimpleNamespace(engine=engine, router=router)
            )
            names = await serve._has_begun(
                server, stop, serve.Narrator(SystemClock()), {"address": "localhost:1"}
            )
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    assert [record.getMessage() for record in caplog.records] == lines
    assert bool(names) is is_frozen is bool(lines)


@pytest.mark.parametrize(
    ("connection_limit", "event"), [(1, "open_files_allowed"), (1 << 40, "open_files_short")]
)
def test_the_log_says_where_fewer_connections_can_be_open_than_are_let_in(
    connection_limit: int, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "icehouse.boot"):
        serve._allow_open_files(Config(connection=ConnectionConfig(connection_limit=connection_limit)))
    assert [record.getMessage() for record in caplog.records] == [event]


async def test_writing_what_ram_holds_is_not_taken_for_stuck_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Each has a bound of its own, which the wait for its thread does not cut short.
    monkeypatch.setattr(serve, "BOUNDS", dataclasses.replace(BOUNDS, step_s=0.0, close_s=0.0))
    codes: list[int] = []
    monkeypatch.setattr(serve, "leave", codes.append)
    model = tiny_model_dir(tmp_path, "llama")
    async with whole_server(
        model, tmp_path / "blocks", cache__block_token_count=16, cache__min_prefix_token_count=0
    ) as server:
        tokens = prompt_pb2.TokenPrompt(ids=[i % 90 + 5 for i in range(900)])
        await server.inference.Generate(
            messages.GenerateRequest(prompt={"tokens": tokens}, max_output_tokens=1)
        )
    assert not codes, caplog.text


@pytest.mark.parametrize(
    ("owner", "method", "line"),
    [(BlockStore, "close", "stuck_storage_abandoned"), (ModelRunner, "close", "stuck_inference_abandoned")],
)
async def test_a_thread_that_hangs_is_left_and_the_exit_says_so(
    owner: type, method: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    go_on, original = threading.Event(), getattr(owner, method)

    def hang(self: Any) -> Any:
        go_on.wait(BOUND_S)
        return original(self)

    monkeypatch.setattr(owner, method, hang)
    # The edge's bound is the inference thread's where it has nothing to write.
    bounds = dataclasses.replace(BOUNDS, step_s=0.0, edge_s=1.0, close_s=0.0, closed_s=0.2)
    monkeypatch.setattr(serve, "BOUNDS", bounds)
    codes: list[int] = []
    monkeypatch.setattr(serve, "leave", codes.append)
    flush_s = 20.0 if owner is BlockStore else 0.0
    model = tiny_model_dir(tmp_path, "llama")
    async with whole_server(model, tmp_path / "blocks", cache__flush_timeout_s=flush_s) as server:
        pass
    assert codes == [1] and line in caplog.text
    go_on.set()
    assert server.served.inference.join(timeout_s=BOUND_S)
    assert server.served.tiers is not None and server.served.tiers.join(timeout_s=BOUND_S)


async def test_telemetry_that_does_not_end_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    monkeypatch.setattr(TelemetryParts, "stop", lambda _parts: never.wait(BOUND_S))
    monkeypatch.setattr(serve, "BOUNDS", dataclasses.replace(BOUNDS, telemetry_s=0.05))
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks"):
        pass
    assert "stuck_telemetry_abandoned" in caplog.text
    never.set()


async def test_a_background_task_that_failed_costs_nothing_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_security: ServerSecurity) -> None:
        raise OverflowError("date value out of range")

    monkeypatch.setattr(ServerSecurity, "run", fail)
    model = tiny_model_dir(tmp_path, "llama")
    async with whole_server(
        model, tmp_path / "blocks", cache__block_token_count=16, cache__min_prefix_token_count=0
    ) as server:
        tokens = prompt_pb2.TokenPrompt(ids=[i % 90 + 5 for i in range(100)])
        await server.inference.Generate(
            messages.GenerateRequest(prompt={"tokens": tokens}, max_output_tokens=1)
        )
    assert "background_task_failed" in caplog.text
    assert server.served.inference.join(timeout_s=0)
    assert server.served.tiers is not None and server.served.tiers.join(timeout_s=0)
    assert len([*(tmp_path / "blocks").rglob("*.safetensors")]) >= 6, "RAM's blocks were not written"


async def test_an_open_address_is_refused_before_a_model_is_looked_for() -> None:
    config = load_config(flags={"server.host": "0.0.0.0", "model.model": "no/such folder"}, environ={}).config
    with pytest.raises(StartError) as caught:
        await serve._serve(config, SystemClock(), ServiceManager(None), find_device())
    assert caught.value.reason is Reason.ADDRESS_INSECURE


@pytest.mark.parametrize("taken", ["port", "metrics", "socket", "cache"])
async def test_what_is_taken_is_told_before_a_model_is_looked_for(tmp_path: Path, taken: str) -> None:
    flags: dict[str, object] = {"model.model": "no/such folder", "cache.directory": str(tmp_path / "cache")}
    with contextlib.ExitStack() as held:
        if taken in ("port", "metrics"):
            other = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            flags["server.port"] = 0
            flags["server.port" if taken == "port" else "telemetry.metrics_port"] = other.getsockname()[1]
        elif taken == "socket":
            listener = held.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            flags["server.uds"] = str(tmp_path / "s")
        else:
            flags["server.port"] = 0
            held.callback(os.close, take_lock(Files(), StorePaths(str(tmp_path / "cache"))))
        config = load_config(flags=flags, environ={}).config
        with pytest.raises(StartError) as caught:
            await serve._serve(config, SystemClock(), ServiceManager(None), find_device())
    assert caught.value.reason is (Reason.STORE_LOCKED if taken == "cache" else Reason.ADDRESS_IN_USE)
    assert taken == "cache" or not (tmp_path / "cache").exists()


@pytest.mark.parametrize("why", ["it is not a folder", "this user may not write there"])
async def test_a_cache_directory_that_cannot_be_is_told_before_a_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "it is not a folder":
        (tmp_path / "file").touch()
    else:
        # Whoever runs the tests may write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    flags = {"cache.directory": str(tmp_path / "file" / "kv"), "model.model": "no/such folder"}
    config = load_config(flags={**flags, "server.port": 0}, environ={}).config
    with pytest.raises(StartError, match=why) as caught:
        await serve._serve(config, SystemClock(), ServiceManager(None), find_device())
    assert caught.value.reason is Reason.STORE_UNUSABLE


def test_a_disk_that_is_nearly_full_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CacheConfig(directory=str(tmp_path / "kv"), ssd_bytes=1 << 20)
    check_directory(cache)
    assert caplog.records == []
    check_directory(dataclasses.replace(cache, free_space_floor_bytes=1 << 60))
    assert [record.getMessage() for record in caplog.records] == ["cache_disk_short"]
    assert not (tmp_path / "kv").exists()


async def test_weights_beyond_the_memory_are_refused_before_they_are_read(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    (model / "tokenizer.json").write_text("nobody gets as far as this")
    flags = {"model.model": str(model), "server.port": 0, "cache.ssd_enabled": False}
    config = load_config(flags={**flags, "engine.memory_limit_bytes": 1000}, environ={}).config
    with pytest.raises(StartError, match="serve a smaller model") as caught:
        await serve._serve(config, SystemClock(), ServiceManager(None), find_device())
    assert caught.value.reason is Reason.MEMORY_NEVER_FITS


async def test_the_log_says_that_the_cache_is_had_only_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, blocks = tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks"

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]

    with caplog.at_level(logging.INFO, "icehouse.boot"):
        async with whole_server(model, blocks):
            assert "cache_lock_acquired" in told()
            caplog.clear()
            flags = {"server.port": 0, "cache.directory": str(blocks), "model.model": str(model)}
            config = load_config(flags=flags, environ={}).config
            with pytest.raises(StartError, match=f"is in use by process {os.getpid()}"):
                await serve._serve(config, SystemClock(), ServiceManager(None), find_device())
            assert told() == []


async def test_what_a_pool_imports_is_frozen_before_any_model_is_there() -> None:
    frozen_counts = []

    async def start() -> None:
        frozen_counts.append(gc.get_freeze_count())

    pool: Any = types.SimpleNamespace(start=start, listed=lambda _: [types.SimpleNamespace(name="a")])
    gc.unfreeze()
    assert await serve._pool_names(pool, asyncio.Event()) == ["a"]
    gc.unfreeze()
    assert frozen_counts > [0]
