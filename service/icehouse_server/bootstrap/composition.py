"""Composition root: from a configuration to a server that is wired but not started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icehouse_server.bootstrap.cache_parts import (
    SsdParts,
    build_cache_parts,
    identified,
    open_ssd,
)
from icehouse_server.bootstrap.group.leading import LeaderParts, check_shardable
from icehouse_server.bootstrap.machine import memory_limit, weights_dtype
from icehouse_server.bootstrap.model_source import KeptTexts, model_source, suited
from icehouse_server.bootstrap.telemetry import (
    KvEventParts,
    TelemetryParts,
    kv_event_source,
    worker_models,
    worker_parts,
)
from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.device import Device
from icehouse_server.engine.core.mailbox import Mailbox, Message
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.kv.page_groups import PAGE_TOKEN_COUNT
from icehouse_server.engine.runner.encoder_runner import EncoderRunner
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.model_loader import (
    ModelSource,
    read_config,
    reads_whole,
    sees_images,
    vocabulary_size,
)
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.engine.runner.vision import mlx_vlm
from icehouse_server.engine.runner.warm_up import CommonParts
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.policy import GPU_POLICY, POLICY, PassPolicy
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import IcehouseError, model_invalid
from icehouse_server.group.leader_runner import LeaderRunner
from icehouse_server.group.membership import Membership
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.pool.one_seat import OneSeat
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.engine_client.grammars import GrammarCompilers
from icehouse_server.rpc.engine_client.router import EngineListener, Router
from icehouse_server.rpc.engine_client.seat import Seat
from icehouse_server.rpc.kv_events.kv_event_source import KvEventSource
from icehouse_server.rpc.rpc_server import RpcServer
from icehouse_server.storage.api import ColdTier
from icehouse_server.storage.local.block_format.block_bytes import BlockBytes
from icehouse_server.storage.local.model_tiers import ModelTiers
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.structured_output.probe_process import ProbeLimits, ProbeProcess
from icehouse_server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # These need optional extras.
    from icehouse_server.rpc.worker.worker_info import WorkerParts
    from icehouse_server.vision.image_reader import ImageReader

_log = logging.getLogger("icehouse.boot")

_END_S = 10.0
"""How long an engine may take to end, without its writes to SSD, and how long its SSD tier may."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Values for engine settings that are 0."""

    decode_batch_limit: int
    prefill_chunk_token_count: int
    prefill_grid_token_count: int
    chunks_per_pass: int
    """How many chunks, of several prompts, fit into a pass."""
    policy: PassPolicy


# Measured with mlx 0.32.4 on 2 x86 cores: prefill of small models reaches its full rate with chunks of 32
# tokens; larger models read their weights for longer. When sixteen prompts of 40 tokens came together, the
# last first token took 0.65 and 0.80 of the batch engine's time with 512, and 0.92 twice with 256.
CPU_DEFAULTS = DeviceDefaults(
    decode_batch_limit=64,
    prefill_chunk_token_count=512,
    prefill_grid_token_count=8,
    chunks_per_pass=1,
    policy=POLICY,
)
GPU_DEFAULTS = DeviceDefaults(
    decode_batch_limit=256,
    prefill_chunk_token_count=2048,
    prefill_grid_token_count=16,
    chunks_per_pass=4,
    policy=GPU_POLICY,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """The parts of one server, which `cli.serve` starts and stops."""

    inference: InferenceThread
    rpc: RpcServer
    clock: Clock
    tiers: ModelTiers | None
    """For all models; None without an SSD tier."""
    telemetry: TelemetryParts
    kv_events: KvEventParts
    opened: OpenedEngine | None = None
    """The only model's; None if there are several."""
    pool: ModelPool[OpenedEngine] | None = None
    leader: LeaderParts | None = None
    """Set if the server is rank 0 of a group."""

    def begin_stop(self) -> Sequence[OpenedEngine]:
        """Stop loading models and waiting for ranks; return the engines that exist."""
        if self.leader is not None:
            self.leader.call_off()
        if self.pool is not None:
            return self.pool.begin_stop()
        return [self.only]

    @property
    def only(self) -> OpenedEngine:
        """The only model."""
        assert self.opened is not None, "a server has a pool or one model"
        return self.opened


@dataclasses.dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engines of a server share."""

    device: Device
    clock: Clock
    inference: InferenceThread
    budget: MemoryBudget
    ssd: SsdParts | None
    telemetry: TelemetryParts
    kv_events: KvEventParts
    are_several: bool
    """Whether there may be more than one. Then pages are allocated when needed, not all at once: other models
    need memory, too."""
    common: CommonParts
    """Owned by the inference thread."""
    texts: KeptTexts = dataclasses.field(default_factory=KeptTexts)

    @classmethod
    def of(cls, config: Config, device: Device, clock: Clock) -> EngineParts:
        """Wire the shared parts; raises StartError."""
        ssd = open_ssd(config, device=device, clock=clock)
        budget = MemoryBudget(memory_limit(config.engine.memory_limit_bytes, device))
        telemetry, kv_events = TelemetryParts(config), KvEventParts(config, clock)
        inference, are_several = InferenceThread(clock), bool(config.models)
        common = CommonParts(inference.device_clock)
        return cls(device, clock, inference, budget, ssd, telemetry, kv_events, are_several, common)

    @property
    def tiers(self) -> ModelTiers | None:
        return None if self.ssd is None else self.ssd.tiers

    @property
    def watchers(self) -> Telemetry:
        """What watches calls and takes samples."""
        return dataclasses.replace(self.telemetry.watchers, kv_events=self.kv_events.stats)


def build_server(
    config: Config,
    parts: EngineParts,
    *,
    model: ModelSource,
    router: Router,
    draft: ModelSource | None = None,
    membership: Membership | None = None,
) -> Server:
    """Wire a server of one model, alone or as rank 0 of a group. Reads the tokenizer; raises ModelError if
    the folder has none that can be read."""
    config, clock = suited(config, model), parts.clock
    if not config.cache.has_ssd:
        parts = dataclasses.replace(parts, ssd=None)
    leader = None
    if membership is not None:
        check_shardable(model, config)
        limit_bytes = memory_limit(config.engine.memory_limit_bytes, parts.device)
        leader = LeaderParts(membership, config, memory_limit_bytes=limit_bytes, clock=clock, router=router)
    opened = open_engine(config, model=model, draft=draft, router=router, parts=parts, leader=leader)
    parts.kv_events.add(opened.source.model_id, opened.kv_events)
    seats = OneSeat(opened.seat, clock)
    worker = worker_models(config, ports={})
    if worker is not None:
        worker.parts[seats.default_name] = opened.worker_parts(config)
    watchers = parts.watchers
    if leader is not None:
        watchers = dataclasses.replace(watchers, group=leader.stats)
    rpc = RpcServer(config=config, seats=seats, clock=clock, telemetry=watchers, worker=worker)
    return Server(
        parts.inference, rpc, clock, parts.tiers, parts.telemetry, parts.kv_events, opened, leader=leader
    )


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedEngine:
    """One model's engine and what belongs to it, wired but not started."""

    engine: Engine
    seat: Seat
    storage: ColdTier | None
    """None without an SSD tier."""
    kv_events: KvEventSource
    publishing: KvEventParts
    source: ModelSource
    running_limit: int
    clock: Clock
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Closed when the engine ends."""

    @property
    def router(self) -> Router:
        return self.seat.router

    @property
    def error(self) -> IcehouseError | None:
        return self.engine.error

    def worker_parts(self, config: Config) -> WorkerParts:
        """Return what gateways may know about the model."""
        return worker_parts(config, self.source, running_limit=self.running_limit, kv_events=self.kv_events)

    def start(self) -> None:
        """Start loading."""
        if self.storage is not None:
            self.storage.start()
        self.seat.grammars.start()
        self.publishing.add(self.source.model_id, self.kv_events)
        self.engine.start()

    def give_up(self) -> None:
        """Give up its place in the SSD tier, if it will never be started."""
        if self.storage is not None:
            self.storage.close(deadline_time=self.clock.monotonic())

    async def end(self) -> None:
        """End what runs, write RAM's blocks to SSD and free the memory. May be called again."""
        self.seat.close()
        self.engine.drain(grace_s=0.0)
        is_done = await asyncio.to_thread(self.engine.join, timeout_s=_END_S + self.engine.flush_timeout_s)
        if self.storage is not None:
            self.storage.close(deadline_time=self.clock.monotonic() + _END_S)
            is_done &= await asyncio.to_thread(self.storage.join, timeout_s=2 * _END_S)
        await self.publishing.remove(self.source.model_id)
        self.held.close()
        if not is_done:
            _log.error("stuck_model_abandoned", extra={"model": self.source.model_id})


def open_engine(
    config: Config,
    *,
    model: ModelSource,
    draft: ModelSource | None,
    router: Router,
    parts: EngineParts,
    expected_bytes: int = 0,
    leader: LeaderParts | None = None,
) -> OpenedEngine:
    """Wire the engine of one model. Any thread; reads the tokenizer, and raises ModelError.

    `expected_bytes` is what the model will take beside others, 0 if there are none.
    """
    device, clock = parts.device, parts.clock
    config = suited(config, model)
    source = model_source(config, model, dtype=weights_dtype(config.model, device))
    text = parts.texts.read(source, functools.partial(grammar_compiler, config, source))
    tokenizer = text.tokenizer
    source, fingerprint = identified(source, config, parts.ssd, device=device, clock=clock, leader=leader)
    limits = engine_limits(config, device)
    mailbox: Mailbox[Message] = Mailbox(limit=config.engine.mailbox_limit, changed=parts.inference.changed)
    runner = build_runner(
        source,
        draft,
        tokenizer,
        settings=runner_settings(config, device, are_several=parts.are_several),
        clock=clock,
        common=parts.common,
        fingerprint_hex=fingerprint.value.hex(),
        leader=leader,
    )
    images = image_reader(config, source)
    grammars = grammar_compilers(config, text.compiler)
    # Last: nothing after it may fail, since the model holds its place in the SSD tier until it has ended.
    cache = build_cache_parts(
        config.cache,
        config.tenant,
        fingerprint,
        parts.ssd if config.cache.has_ssd else None,
        adapters=source.adapters,
        device=device,
        post=parts.telemetry.watching(mailbox.post),
        as_group=None if leader is None else leader.open_tier,
    )
    # A group's blocks are split over its machines.
    block_files = BlockBytes() if config.cache.has_ssd and leader is None else None
    engine = Engine(
        settings=engine_settings(config, limits, expected_bytes=expected_bytes),
        runner=runner,
        make_prefix=lambda: cache.open_controller(runner, clock),
        tokenizer=tokenizer,
        mailbox=mailbox,
        listener=EngineListener(router, tokenizer, images, block_files),
        thread=parts.inference,
        budget=parts.budget,
    )
    seat = Seat(engine=engine, router=router, grammars=grammars)
    kv_events = kv_event_source(config, cache.log, engine=engine, router=router, clock=clock)
    return OpenedEngine(
        engine, seat, cache.storage, kv_events, parts.kv_events, source, limits.running_limit, clock
    )


def engine_settings(config: Config, limits: SchedulerLimits, *, expected_bytes: int) -> EngineSettings:
    """Return the settings of an engine, for what its runner runs."""
    return EngineSettings(
        limits=limits,
        waiting=WaitingLimits(
            request_limit=config.engine.waiting_limit,
            token_limit=config.engine.waiting_token_limit,
            tenant_running_limit=config.engine.tenant_running_limit,
            aging_s=config.engine.aging_s,
        ),
        flush_timeout_s=config.cache.flush_timeout_s,
        expected_bytes=expected_bytes,
    )


def build_runner(
    source: ModelSource,
    draft: ModelSource | None,
    tokenizer: Tokenizer,
    *,
    settings: RunnerSettings,
    clock: Clock,
    common: CommonParts,
    fingerprint_hex: str,
    leader: LeaderParts | None = None,
) -> ModelRunner | EncoderRunner | LeaderRunner:
    """Create the runner of the model in a folder. Raises ModelError for a draft model with an encoder, and
    for an encoder in a group."""
    if not reads_whole(source.path):
        own = ModelRunner(
            source=source,
            tokenizer=tokenizer,
            settings=settings,
            clock=clock,
            common=common,
            fingerprint_hex=fingerprint_hex,
            draft_source=draft and dataclasses.replace(draft, dtype=source.dtype),
            rank=None if leader is None else leader.rank,
        )
        return own if leader is None else leader.leading(own)
    if leader is not None:
        raise model_invalid(f"the model in {source.path} is an encoder, which a group does not serve")
    if draft is not None:
        raise model_invalid(f"the model in {source.path} decodes nothing; serve it without a draft model")
    return EncoderRunner(
        source=source,
        tokenizer=tokenizer,
        settings=settings,
        clock=clock,
        device_clock=common.device_clock,
    )


def runner_settings(config: Config, device: Device, *, are_several: bool = False) -> RunnerSettings:
    """Return the settings for running the model on this device."""
    return RunnerSettings(
        is_pipelined=device.runs_ahead,
        attention=Attention(config.engine.attention),
        warms_every_draw=device.compiles_at_first_use,
        joins_layers=device.products_are_costly,
        is_memory_wired=config.engine.wired_memory,
        memory_limit_bytes=0 if are_several else memory_limit(config.engine.memory_limit_bytes, device),
        image_feature_limit_bytes=config.engine.image_feature_bytes,
        block_token_count=config.cache.block_token_count,
        kv_bits=config.cache.kv_bits,
        kv_group_size=config.cache.kv_group_size,
    )


def grammar_compiler(config: Config, source: ModelSource, tokenizer: Tokenizer) -> GrammarCompiler:
    """Return the compiler of response formats for the model's vocabulary."""
    # A format is compiled twice, and may wait for another one.
    limits = ProbeLimits(
        cpu_s=max(1, round(config.server.grammar_timeout_s / 4)),
        stack_bytes=GrammarCompiler.stack_bytes(config.server.max_grammar_bytes),
    )
    return GrammarCompiler(
        tokenizer,
        vocabulary_size=vocabulary_size(read_config(source.path), tokenizer),
        cache_limit=config.server.grammar_cache_count,
        make_probe=lambda setup: ProbeProcess(setup, limits),
    )


def grammar_compilers(config: Config, compiler: GrammarCompiler) -> GrammarCompilers:
    """Return the threads that compile response formats."""
    return GrammarCompilers(
        compiler, byte_limit=config.server.max_grammar_bytes, timeout_s=config.server.grammar_timeout_s
    )


def image_reader(config: Config, source: ModelSource) -> ImageReader | None:
    """Return the model's image reader; None if it reads only text.

    Raises ModelError if the extra is missing or the folder has no processor.
    """
    if not sees_images(source.path):
        return None
    # This needs an optional extra.
    from icehouse_server.vision.decoder import ImageLimits
    from icehouse_server.vision.image_reader import ImageReader
    from icehouse_server.vision.processor import open_processor

    limits = ImageLimits(
        image_count=config.server.max_images,
        size_bytes=config.server.max_image_bytes,
        pixel_count=config.server.max_image_pixels,
        prepared_bytes=config.server.image_memory_bytes // 2,
    )
    model = read_config(source.path)
    processor = open_processor(source.path, str(model["model_type"]))
    return ImageReader(processor, limits, image_token_id=mlx_vlm.image_token_id(model))


def engine_limits(whole: Config, device: Device) -> SchedulerLimits:
    """Return the scheduler's limits; a setting of 0 gets the device's default."""
    config = whole.engine
    defaults = GPU_DEFAULTS if device.is_gpu else CPU_DEFAULTS
    chunk_token_count = config.prefill_chunk_token_count or defaults.prefill_chunk_token_count
    pads = device.attention_shapes_are_costly
    grid = PAGE_TOKEN_COUNT if pads else defaults.prefill_grid_token_count
    return SchedulerLimits(
        running_limit=config.decode_batch_limit or defaults.decode_batch_limit,
        prefilling_limit=config.prefilling_limit,
        prefill_chunk_token_count=chunk_token_count,
        prefill_grid_token_count=math.gcd(chunk_token_count, grid),
        pass_token_count=defaults.chunks_per_pass * chunk_token_count,
        pads_attention=pads,
        prefill_chunk_s=config.prefill_chunk_ms / 1000,
        prefill_slice_s=config.prefill_slice_ms / 1000,
        policy=defaults.policy,
    )
