"""The real edge and the real engine in this process, around a runner that a test holds in its hand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc, prompt_pb2, server_service_pb2, server_service_pb2_grpc
from icehouse_server.clock import SystemClock
from icehouse_server.config import Config, ServerConfig
from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine.core.mailbox import Mailbox
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.ports import Chunk, Drawn, PassResult
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.engine_client.engine_ports import CommandReply, ServedModel, StatsReply
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.rpc_server import RpcServer

from tests.fixtures.engine import FakeDecoder, FakeRunner, no_prefix
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import FakeTokenizer
from tests.fixtures.rpc.seats import one_seat

_STEP_S = 0.001


class MovableClock:
    """The system's clock plus what a test adds to it."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._system.monotonic() + self.ahead_s

    def wall(self) -> float:
        return self._system.wall() + self.ahead_s


class HeldRunner(FakeRunner):
    """Decodes while nobody holds it. Paused, the loop turns and nothing is drawn; stuck, it stands still."""

    def __init__(self) -> None:
        super().__init__(context_token_limit=1 << 20)
        self.is_paused = False
        self.stuck = threading.Event()
        """A step stands still."""
        self._free = threading.Event()
        self._free.set()
        self._never = threading.Event()
        self.next_token = lambda history: 97

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        if before_wait is not None:
            before_wait()
        if not self._free.is_set():
            self.stuck.set()
            assert self._free.wait(BOUND_S), "nobody freed the step"
        # A device's step takes time too, in which the event loop has the interpreter to itself.
        self._never.wait(_STEP_S)
        return super().run(chunks)

    def draw(self) -> list[Drawn]:
        return [] if self.is_paused else super().draw()

    def get_stuck(self) -> None:
        """The next step does not return until `come_free`."""
        self._free.clear()

    def come_free(self) -> None:
        """Let the loop go on."""
        self._free.set()


class EngineSeam:
    """The engine as the edge wants it, and the router as the engine wants it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.engine: Engine | None = None
        self.cancelled: list[str] = []

    @property
    def heartbeat_time(self) -> float:
        return self.engine.heartbeat_time

    @property
    def step_allowance_s(self) -> float:
        return self.engine.step_allowance_s

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        self.engine.submit(request, siblings)

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)
        self.engine.cancel(request_id)

    def request_stats(self, reply: StatsReply) -> None:
        self.engine.request_stats(reply)

    def submit_command(self, command: Any, reply: CommandReply) -> None:
        self.engine.submit_command(command, reply)

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        self._router.publish(events)

    def model_loaded(self, info: ModelInfo) -> None:
        self._router.model_loaded(ServedModel(info, FakeTokenizer()))

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        self._router.state_changed(state, error)


class LiveServer:
    """What a test looks at."""

    def __init__(self, *, runner: HeldRunner, clock: MovableClock, router: Router, seam: EngineSeam) -> None:
        self.runner = runner
        self.clock = clock
        self.router = router
        self.seam = seam
        self.channel: Any = None

    @property
    def inference(self) -> Any:
        return inference_service_pb2_grpc.InferenceServiceStub(self.channel)

    async def stats(self) -> Any:
        """Return the engine's counters between two steps."""
        server = server_service_pb2_grpc.ServerServiceStub(self.channel)
        return (await server.GetStats(server_service_pb2.GetStatsRequest())).stats.engine

    async def stats_when(self, holds: Callable[[Any], bool]) -> Any:
        """Ask, one step after another, until the counters are as wanted."""
        async with asyncio.timeout(BOUND_S):
            while not holds(stats := await self.stats()):
                pass
        return stats

    async def begin(self, name: str, *, max_output_tokens: int = 1000, **kwargs: Any) -> Any:
        """Open a stream and return it when its request runs."""
        stream = self.inference.Stream(request(name, max_output_tokens=max_output_tokens), **kwargs)
        assert (await stream.read()).WhichOneof("event") == "started"
        return stream


def request(name: str, *, token_count: int = 3, max_output_tokens: int = 4) -> messages.GenerateRequest:
    """Return a request with a prompt of tokens."""
    prompt = prompt_pb2.TokenPrompt(ids=[1 + i % 90 for i in range(token_count)])
    return messages.GenerateRequest(
        request_id=name, prompt={"tokens": prompt}, max_output_tokens=max_output_tokens
    )


async def rest_of(stream: Any) -> list[Any]:
    """Return a stream's messages from here to its end; raises its status when that is an error."""
    found = []
    while (response := await stream.read()) is not grpc.aio.EOF:
        found.append(response)
    return found


async def is_finished(stream: Any) -> bool:
    """Read to the end and tell whether the last event is the finish."""
    return str((await rest_of(stream))[-1].WhichOneof("event")) == "finished"


@contextlib.asynccontextmanager
async def live_server(
    *,
    running_limit: int = 64,
    waiting_limit: int = 64,
    memory_limit_bytes: int = 0,
    stuck_timeout_s: float = 30.0,
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(chr(i) for i in ids),
    **settings: Any,
) -> AsyncIterator[LiveServer]:
    """Serve on a free loopback port until the block ends; then drain without grace."""
    clock, runner = MovableClock(), HeldRunner()
    router = Router(asyncio.get_running_loop())
    seam = EngineSeam(router)
    thread = InferenceThread(clock)
    seam.engine = engine = Engine(
        runner=runner,
        settings=EngineSettings(
            limits=SchedulerLimits(
                running_limit=running_limit, prefilling_limit=4, prefill_chunk_token_count=16
            ),
            waiting=WaitingLimits(request_limit=waiting_limit),
        ),
        budget=MemoryBudget(memory_limit_bytes),
        tokenizer=FakeDecoder(decode),
        mailbox=Mailbox(limit=1000, changed=thread.changed),
        listener=seam,
        thread=thread,
        make_prefix=lambda: no_prefix(clock),
    )
    server = RpcServer(
        config=Config(server=ServerConfig(**{"port": 0, "stuck_timeout_s": stuck_timeout_s, **settings})),
        seats=one_seat(seam, router, clock),
        clock=clock,
    )
    live = LiveServer(runner=runner, clock=clock, router=router, seam=seam)
    address = await server.start()
    thread.start()
    engine.start()
    # A window that does not grow, so that a reader who stops is felt soon.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as live.channel:
            await _until_ready(router)
            yield live
    finally:
        runner.come_free()
        runner.is_paused = False
        engine.drain(grace_s=0)
        thread.end()
        await server.stop(grace_s=1)
        assert await asyncio.to_thread(thread.join, timeout_s=BOUND_S)


async def _until_ready(router: Router) -> None:
    changed = asyncio.Event()
    router.add_listener(changed.set)
    async with asyncio.timeout(BOUND_S):
        while router.state is not EngineState.READY:
            changed.clear()
            await changed.wait()
