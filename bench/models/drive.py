"""Drive: fifty callers at random on three models, of which memory holds one and a half.

They generate, stream, chat, leave in the middle, load and unload. Every reply must be what a server of that
model alone said, greedy and with a seed; no call may be lost, or refused but for want of memory or room in a
queue; memory must stay within the budget; nothing may be left running at the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import model_service_pb2 as models
from icehouse.v1 import prompt_pb2

from bench.grpc_clients import NO_CACHE, READ_WRITE, Client, connected
from bench.models.served import pool_process, weight_bytes
from bench.report import console, show_table, spread_of
from bench.server_process import ServerProcess
from bench.soak import Sample, sample_of, trend_of
from tests.fixtures.models.folder import tiny_model_dir

CALLER_COUNT = 50
_SHAPES = {
    "llama": {"hidden_size": 256, "intermediate_size": 2048},
    "gemma3_text": {"hidden_size": 256, "intermediate_size": 2048},
    "qwen3_next": {"hidden_size": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 256},
}
"""Full attention, sliding windows, recurrent states: three tiny models of some 30 MB each."""
_ROOM = 1.5
"""Of the largest model, which is what all may take."""
_FLAGS = (
    ("--block-token-count", "16"),
    ("--min-prefix-token-count", "0"),
    ("--ram-bytes", str(2 << 20)),
    ("--ssd-bytes", str(64 << 20)),
    ("--write-queue-bytes", str(4 << 20)),
    ("--free-space-floor-bytes", "0"),
    ("--prefill-chunk-token-count", "64"),
    ("--drain-grace-s", "60"),
)
_PREFIX_COUNT, _CASE_COUNT = 4, 24
_PATIENCE_S = 300.0
"""A call that has not ended by then is lost. Models give way within a minute, several times over."""
_SAMPLE_S = 1.0
_MAY_REFUSE = frozenset({"MEMORY_SHORT", "QUEUE_FULL"})


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A request to any of the models."""

    prompt: prompt_pb2.Prompt
    output_token_count: int
    seed: int | None
    """None for greedy."""

    def request(self, model: str, *, reads_cache: bool) -> messages.GenerateRequest:
        request = messages.GenerateRequest(
            model=model,
            prompt=self.prompt,
            max_output_tokens=self.output_token_count,
            cache=READ_WRITE if reads_cache else NO_CACHE,
        )
        if self.seed is not None:
            request.sampling.temperature = 0.8
            request.sampling.seed = self.seed
        return request


Said = dict[tuple[str, int], tuple[int, ...]]
"""The tokens of each model's reply to each case."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What callers met."""

    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    """Calls by what they were, and refusals by their reasons."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """What must not be."""
    waits_s: list[float] = dataclasses.field(default_factory=list)
    """From the call to the first token."""
    active_bytes: int = 0
    """The most that the server counted."""
    rss_bytes: int = 0
    """The most above what it took before anyone came."""
    limit_bytes: int = 0
    samples: list[Sample] = dataclasses.field(default_factory=list)
    """The server process, about once a second."""

    def note(self, kind: str) -> None:
        """Count a call that ended."""
        self.ended[kind] = self.ended.get(kind, 0) + 1

    @property
    def is_good(self) -> bool:
        return not self.wrong and self.active_bytes <= self.limit_bytes


def cases() -> list[Case]:
    """Return prompts of which many share a beginning: tokens, and chats."""
    source = random.Random(5)
    prefixes = [[source.randrange(10, 250) for _ in range(96)] for _ in range(_PREFIX_COUNT)]
    found = []
    for index in range(_CASE_COUNT):
        if index % 4 == 3:
            words = " ".join(str(source.randrange(1000)) for _ in range(source.randrange(5, 30)))
            message = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content=words)
            prompt = prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=[message]))
        else:
            shared = prefixes[index % _PREFIX_COUNT][: 16 * source.randrange(0, 7)]
            own = [source.randrange(10, 250) for _ in range(source.randrange(3, 60))]
            prompt = prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(ids=shared + own))
        seed = None if index % 2 else source.randrange(1 << 30)
        found.append(Case(prompt, source.randrange(4, 48), seed))
    return found


async def drive(scratch: Path, log_file: Path, *, duration_s: float, seed: int) -> Tally:
    """Have callers come to a server for so long; return what they met."""
    folders = [tiny_model_dir(scratch, name, **shape) for name, shape in _SHAPES.items()]
    asked = cases()
    said: Said = {}
    for folder in folders:
        said |= await _said_alone(folder, asked, scratch / "alone", log_file)
    limit_bytes = round(_ROOM * max(map(weight_bytes, folders)))
    flags = [*(word for flag in _FLAGS for word in flag), "--memory-limit-bytes", str(limit_bytes)]
    tally = Tally(limit_bytes=limit_bytes)
    with pool_process(folders, scratch, log_file=log_file, flags=flags) as server:
        async with connected(server.address, CALLER_COUNT + 1) as (watcher, *clients):
            end_time = time.monotonic() + duration_s
            watching = asyncio.create_task(_watch(watcher, server, tally))
            names = [folder.name for folder in folders]
            callers = [
                _Caller(client, names, asked, said, random.Random(f"{seed} {index}"), tally)
                for index, client in enumerate(clients)
            ]
            async with asyncio.TaskGroup() as group:
                for caller in callers:
                    group.create_task(caller.call_until(end_time))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for model in (await watcher.stats()).models:
                if model.engine.decoding_count or model.engine.waiting_count:
                    tally.wrong.append(f"{model.model}: something runs when all have left")
    return tally


async def _said_alone(folder: Path, asked: Sequence[Case], blocks: Path, log_file: Path) -> Said:
    """Return what a fresh server of one model says, asked one thing at a time without a cache."""
    with ServerProcess(model=str(folder), cache_directory=blocks, log_file=log_file) as server:
        async with connected(server.address, 1) as (client,):
            return {
                (folder.name, index): tuple(
                    (await client.inference.Generate(case.request("", reads_cache=False))).token_ids
                )
                for index, case in enumerate(asked)
            }


async def _watch(client: Client, server: ServerProcess, tally: Tally) -> None:
    began = time.monotonic()
    while True:
        stats = await client.stats()
        # Each model leaves out its own free pages.
        counted = [model.engine.active_memory_bytes for model in stats.models]
        tally.active_bytes = max(tally.active_bytes, min(counted, default=0))
        sample = sample_of(server.process_id, time.monotonic() - began, sum(tally.ended.values()))
        tally.samples.append(sample)
        tally.rss_bytes = max(tally.rss_bytes, sample.rss_bytes - tally.samples[0].rss_bytes)
        await asyncio.sleep(_SAMPLE_S)


@dataclasses.dataclass(frozen=True, slots=True)
class _Caller:
    client: Client
    names: Sequence[str]
    asked: Sequence[Case]
    said: Said
    dice: random.Random
    tally: Tally

    async def call_until(self, end_time: float) -> None:
        while time.monotonic() < end_time:
            name, index = self.dice.choice(self.names), self.dice.randrange(len(self.asked))
            kinds = (self._generate, self._stream, self._leave, self._load, self._unload)
            (act,) = self.dice.choices(kinds, weights=(30, 50, 14, 3, 3))
            what = f"{act.__name__.strip('_')} {name} {index}"
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    kind = await act(name, index)
            except TimeoutError:
                self.tally.wrong.append(f"{what}: lost")
            except grpc.aio.AioRpcError as error:
                kind = _reason(error)
                if kind not in _MAY_REFUSE:
                    self.tally.wrong.append(f"{what}: {error.code().name} {kind}: {error.details()}")
                self.tally.note(kind)
            else:
                self.tally.note(kind)

    async def _generate(self, name: str, index: int) -> str:
        request = self.asked[index].request(name, reads_cache=True)
        answer = await self.client.inference.Generate(request)
        self._compare(name, index, answer.token_ids)
        return "generated"

    async def _stream(self, name: str, index: int) -> str:
        request = self.asked[index].request(name, reads_cache=True)
        reply, _, finished = await self.client.stream(request)
        if not finished.usage.output_tokens:
            self.tally.wrong.append(f"stream {name} {index}: ended without its finish")
        self.tally.waits_s.append(reply.ttft_s)
        self._compare(name, index, reply.token_ids)
        return "streamed"

    async def _leave(self, name: str, index: int) -> str:
        call = self.client.inference.Stream(self.asked[index].request(name, reads_cache=True))
        left = self.dice.randrange(6)
        async for _ in call:
            if not left:
                break
            left -= 1
        call.cancel()
        return "left"

    async def _load(self, name: str, _: int) -> str:
        async for _event in self.client.models.LoadModel(models.LoadModelRequest(model=name)):
            pass
        return "loaded"

    async def _unload(self, name: str, _: int) -> str:
        await self.client.models.UnloadModel(models.UnloadModelRequest(model=name))
        return "unloaded"

    def _compare(self, name: str, index: int, token_ids: Sequence[int]) -> None:
        wanted = self.said[name, index]
        if tuple(token_ids) != wanted:
            self.tally.wrong.append(f"{name} {index}: said {list(token_ids)}, alone {list(wanted)}")


def _reason(error: grpc.aio.AioRpcError) -> str:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return error.code().name


def show_drive(tally: Tally) -> None:
    """Print what callers met."""
    waits = spread_of(tally.waits_s)
    rows = [(kind, str(count)) for kind, count in sorted(tally.ended.items())]
    rows += [
        ("wrong", str(len(tally.wrong))),
        ("first token, s", waits.text()),
        ("budget, MiB", f"{tally.limit_bytes / 2**20:.1f}"),
        ("most in arrays, MiB", f"{tally.active_bytes / 2**20:.1f}"),
        ("most resident above the start, MiB", f"{tally.rss_bytes / 2**20:.1f}"),
    ]
    if len(tally.samples) >= 8:
        trend = trend_of(tally.samples)
        rows.append(("resident, last quarter over third", f"{trend.rss_ratio:.3f}"))
        rows.append(("open files, the same", f"{trend.descriptor_growth:+d}"))
    show_table(f"{CALLER_COUNT} callers, {len(_SHAPES)} models, room for {_ROOM} of them", ("", ""), rows)
    for wrong in tally.wrong[:20]:
        console.print(wrong)
