"""Model runner: loads the model, holds open sequences, runs passes (inference thread)."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.clock import Clock
from icehouse_server.device import find_backend, find_device
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, SequenceId
from icehouse_server.domain.model import ModelInfo, PassSplit
from icehouse_server.domain.request import Drafting, ImagePart
from icehouse_server.engine.attention.cpu.quantized import float_bytes
from icehouse_server.engine.attention.port import PagedAttention
from icehouse_server.engine.core.memory_model import DraftFootprint, MemoryModel
from icehouse_server.engine.core.ports import Chunk, DecodeRow, ImageUse, MemoryUse, PassResult
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.backend_choice import kernels_for
from icehouse_server.engine.kv.page_groups import GroupFacts, groups_of, page_token_count_for, pool_sizes
from icehouse_server.engine.kv.paged_cache import Paging
from icehouse_server.engine.kv.pool import PassClock, can_reserve
from icehouse_server.engine.kv.pool_memory import PoolMemory, make_groups
from icehouse_server.engine.kv.runner_blocks import Footprint, RunnerBlocks
from icehouse_server.engine.kv_cache.cache_classes import (
    Cache,
    make_caches,
    quantize_caches,
    step_token_count,
)
from icehouse_server.engine.runner import mlx_lm, model_loader
from icehouse_server.engine.runner.decoding import OpenSequence, digest_of, features_of
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.joined_layers import JoinedLayers
from icehouse_server.engine.runner.forward.probe import examine_steps
from icehouse_server.engine.runner.forward.row import Row
from icehouse_server.engine.runner.forward.splits import Attention, PassFacts
from icehouse_server.engine.runner.freed_buffers import FreedBuffers
from icehouse_server.engine.runner.identity.fingerprint import system_digest_hex
from icehouse_server.engine.runner.pipeline import Pipeline
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.vision.features import ImageFeatures
from icehouse_server.engine.runner.warm_up import (
    TRIED,
    CommonParts,
    KnownModel,
    ModelKey,
    draw_batch,
    end_trial,
    proving_steps,
    warm_up_rows,
    warm_up_steps,
)
from icehouse_server.engine.sampling.sampling_row import SamplingRow
from icehouse_server.errors import ConfigError, Reason, model_invalid
from icehouse_server.text.tokenizer import Tokenizer

_log = logging.getLogger("icehouse.engine")


_POOL_SHARE = 3 / 4
"""Share of the memory beside the weights that pools take; the rest is for what passes compute."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How sequences are run. A `kv_bits` of 0 means the model's own KV type."""

    block_token_count: int = 256
    kv_bits: int = 0
    kv_group_size: int = 64
    is_pipelined: bool = True
    """Run the device a pass ahead of Python; of no use if dispatching waits (the CPU build)."""
    attention: Attention = Attention.AUTO
    """Whether each sequence has its KV in its own caches, or in pages if possible."""
    joins_layers: bool = False
    """Compute layers that read the same input as one product, unless adapters share the model's weights."""
    is_memory_wired: bool = False
    """Metal keeps the pages resident."""
    memory_limit_bytes: int = 0
    """What model, KV and cache may take together; 0 if unknown. Freed buffers held for the next arrays are
    limited to a share of it."""
    warms_every_draw: bool = False
    """While idle, draw once with every option, if kernels are compiled when they first run. On an H100 that
    took over a minute at the first start (mlx 0.32.4 keeps what it compiled)."""
    image_feature_limit_bytes: int = 256 << 20
    """What vectors of images may take in memory, so that an image that comes again is not encoded again."""


class ModelRunner:
    """Implements the engine's Runner with mlx-lm. Refuses every thread but its own.

    `blocks` is what the prefix cache uses of it.
    """

    def __init__(
        self,
        *,
        source: model_loader.ModelSource,
        tokenizer: Tokenizer,
        settings: RunnerSettings,
        clock: Clock,
        fingerprint_hex: str = "",
        draft_source: model_loader.ModelSource | None = None,
        common: CommonParts | None = None,
        rank: Rank | None = None,
    ) -> None:
        """`common` is shared by all models of the process, if there are others; `rank` is set if a group
        shards the model."""
        common = CommonParts() if common is None else common
        self._rank = rank
        self.before_pass: Callable[[Sequence[tuple[OpenSequence, Chunk]]], None] = lambda parts: None
        """Called with the parts of a pass, just before it is built."""
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._fingerprint_hex = fingerprint_hex
        self._draft_source = draft_source
        self._known, self._proved = common.known, common.proved
        self._clock = clock
        self._memory_model: MemoryModel | None = None
        self._thread = OneThread()
        self._model: Any = None
        self._images: ImageFeatures | None = None
        """None for a model that sees no images."""
        self._sequences: dict[SequenceId, OpenSequence] = {}
        self._end_token_ids: tuple[int, ...] = ()
        self._freed = FreedBuffers(lambda: self._paging.free_bytes)
        self._facts = PassFacts(caches=())
        """How passes of the model are run; valid after `load_steps`."""
        self._paging = Paging(())
        """Which KV is in pages; known after `load_steps`."""
        self.pages = PoolMemory()
        self._warm_ups: collections.deque[list[DecodeRow]] = collections.deque()
        """Batches that draw in ways whose kernels are not compiled yet."""
        self._pass_clock = PassClock()
        self._pipeline = Pipeline(
            is_pipelined=settings.is_pipelined,
            clock=clock,
            pass_clock=self._pass_clock,
            device_clock=common.device_clock,
            rank=rank,
        )
        self.blocks = RunnerBlocks(
            self,
            block_token_count=settings.block_token_count,
            is_pipelined=settings.is_pipelined,
            clock=clock,
            thread=self._thread,
            passes=self._pass_clock,
        )

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit what model, KV and cache take together; call before loading."""
        self._settings = dataclasses.replace(self._settings, memory_limit_bytes=limit_bytes)

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
        self._thread.claim()
        if self._rank is not None:
            self._rank.join()
        loaded = yield from model_loader.load_steps(self._source, is_hurried=is_hurried, rank=self._rank)
        self._model = loaded.model
        _log.info("weights_read", extra={"path": self._source.path})
        if loaded.tower is not None:
            limit_bytes = self._settings.image_feature_limit_bytes
            self._images = ImageFeatures(loaded.tower, limit_bytes=limit_bytes, clock=self._clock)
        adapted: list[model_loader.AdaptedModel] = []
        for adapter in self._source.adapters:
            adapted.append(model_loader.attach(adapter, loaded, self._source, rank=self._rank))
            yield None
        if self._settings.is_memory_wired:
            mlx_lm.wire_memory()
        self.blocks.read_layout()
        yield None
        known = self._known.get(self._key)
        if known is None:
            self._facts = yield from self._examined(loaded.model)
        else:
            self._facts = known.passes
            if known.passes.layers_are_joined:
                yield from JoinedLayers.steps(loaded.model)
        self._pipeline.forwards[NO_ADAPTER] = ForwardPass(loaded.model, self._facts)
        seen = known or self._measured()
        self.blocks.footprint = seen.footprint
        yield None
        if known is None:
            yield from warm_up_steps(self, NO_ADAPTER)
        yield from self._page(seen.page_groups, loaded)
        yield None
        if self._paging.groups:
            if known is None:
                yield from warm_up_steps(self, NO_ADAPTER)
            yield from self._proof_of_replays(NO_ADAPTER)
        for adapter, model in zip(self._source.adapters, adapted, strict=True):
            self._pipeline.forwards[adapter.name] = ForwardPass(model.tree, self._facts, self._paging)
            if known is None:
                yield from warm_up_steps(self, adapter.name)
            yield from self._proof_of_replays(adapter.name)
        kv_bytes_per_token = seen.footprint.bytes_per_token
        self._freed.bound(kv_bytes_per_token, memory_limit_bytes=self._settings.memory_limit_bytes)
        info = model_loader.describe(loaded, self._source, self._tokenizer, self._fingerprint_hex)
        if self._settings.warms_every_draw:
            self._warm_ups.extend(warm_up_rows())
        yield None
        draft = yield from self._load_draft(info, is_hurried)
        self._memory_model = self._predicted(loaded, draft, seen.footprint)
        self._end_token_ids = tuple(i for i in info.eos_token_ids if i < info.vocabulary_size)
        return dataclasses.replace(
            info,
            kv_bytes_per_token=kv_bytes_per_token,
            adapters=tuple(model.info for model in adapted),
            pass_splits=self._facts.modes,
            embedding_size=self._facts.hidden_size,
            system_digest_hex=system_digest_hex(
                self._source.path, fingerprint_hex=self._fingerprint_hex, device=info.device
            ),
        )

    def _predicted(
        self, loaded: model_loader.LoadedModel, draft: DraftFootprint, footprint: Footprint
    ) -> MemoryModel:
        """Return what sequences will take."""
        shape = model_loader.shape_of(loaded)
        return MemoryModel(
            shape,
            footprint.bytes_per_token,
            footprint.bytes_per_sequence,
            room_step_token_count=self._paging.groups[0].pool.shape.page_token_count
            if self._paging.groups
            else step_token_count(self.fresh_caches()),
            copies_to_grow=not self._paging.groups,
            pool_bytes=self._paging.bounded_bytes,
            attended_bytes_per_token=self._attended_bytes(
                footprint.bytes_per_token, number_bytes=shape.compute_bytes
            ),
            draft=draft,
            tower=None if loaded.tower is None else loaded.tower.shape(device=find_backend().value),
        )

    def _load_draft(self, info: ModelInfo, is_hurried: Callable[[], bool]) -> Steps[DraftFootprint]:
        if self._draft_source is None:
            return DraftFootprint()
        draft = yield from DraftModel.load_steps(
            self._draft_source, info=info, tokenizer=self._tokenizer, is_hurried=is_hurried
        )
        self._pipeline.draft_model = draft
        return draft.footprint

    def open(self, sequence_id: SequenceId) -> None:
        self._thread.check()
        assert sequence_id not in self._sequences, sequence_id
        self._sequences[sequence_id] = OpenSequence(sequence_id, Row(self.row_caches()))

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        self._thread.check()
        parts = [(self._prepared(chunk), chunk) for chunk in chunks]
        self.before_pass(parts)
        result = self._pipeline.run(parts, before_wait, reads_at_once=reads_at_once)
        if not self._settings.is_pipelined:
            self._freed.trim()
        return result

    def digest(self) -> int:
        """Return a 64-bit digest of the tokens of all open and decoding sequences."""
        return digest_of(self._sequences)

    def layer_count(self) -> int:
        return 0 if self._rank is not None or self._settings.is_pipelined else self._facts.layer_count

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        self._thread.check()
        vectors = self._seen_by_tower.encode(image, budget_s=budget_s)
        if vectors is not None:
            self._sequences[sequence_id].vectors[image.key] = vectors
        return vectors is not None

    def encode_bytes(self, image: ImagePart) -> int:
        has_begun = self._seen_by_tower.has_begun(image)
        return 0 if has_begun else self.memory_model().image_bytes(image.image)

    def image_use(self) -> ImageUse:
        return ImageUse() if self._images is None else self._images.use()

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._thread.check()
        self.blocks.forget(sequence_ids)
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._pipeline.release(sequence)

    def memory_model(self) -> MemoryModel:
        assert self._memory_model is not None, "the model is not loaded yet"
        return self._memory_model

    def memory(self) -> MemoryUse:
        free = self._paging.free_bytes
        return MemoryUse(mx.get_active_memory() - free, mx.get_peak_memory() - free, free)

    def close(self) -> None:
        self._thread.check()
        self._sequences.clear()
        self.blocks.clear()
        self._pipeline.clear()
        for group in self._paging.groups:
            group.pool.close()
        self._paging, self.pages = Paging(()), PoolMemory()
        self._model = self._images = None
        self._facts = PassFacts(caches=())
        mx.clear_cache()

    @staticmethod
    def end_thread() -> None:
        # What is left to the thread's own destructors may abort the process on CUDA (mlx issue 4506).
        mx.clear_streams()

    def caches(self, sequence_id: SequenceId) -> list[Cache]:
        """Return a sequence's own caches for reading; valid until the next pass."""
        return self._sequences[sequence_id].row.caches

    def adopt(self, sequence_id: SequenceId, caches: list[Cache], *, token_count: int) -> None:
        """Open a sequence with rebuilt caches of this many tokens."""
        row = Row(caches, token_count=token_count)
        self._sequences[sequence_id] = OpenSequence(sequence_id, row)

    def row_caches(self) -> list[Cache]:
        """Make the empty caches of a new row, with a page table of its own if KV is in pages."""
        return self._paging.caches(self.fresh_caches())

    def fresh_caches(self) -> list[Cache]:
        """Make empty caches, one per layer, quantized if the settings say so."""
        caches = make_caches(self._model)
        if not self._settings.kv_bits:
            return caches
        return quantize_caches(caches, bits=self._settings.kv_bits, group_size=self._settings.kv_group_size)

    def _prepared(self, chunk: Chunk) -> OpenSequence:
        """Return a chunk's sequence, ready to draw if the chunk ends its prompt."""
        sequence = self._sequences[chunk.sequence_id]
        sequence.adapter = chunk.adapter
        sequence.row.rope_positions = chunk.rope_positions
        draft_model = self._pipeline.draft_model
        wants_draft = chunk.speculation is not None and chunk.speculation.drafting is Drafting.DRAFT_MODEL
        if draft_model is not None and wants_draft:
            # The draft model reads prompts from the start; after reused tokens, once the sequence decodes.
            if sequence.drafted is None and not sequence.row.token_count:
                sequence.drafted = draft_model.open()
            if sequence.drafted is not None:
                sequence.drafted.behind += chunk.token_ids
        sequence.features = features_of(chunk, sequence.vectors)
        if chunk.row is not None:
            sequence.vectors.clear()
            sequence.start_decoding(
                SamplingRow(chunk.row, end_token_ids=self._end_token_ids),
                chunk.row,
                can_take_back=self._facts.can_take_back,
                draft_model=draft_model,
            )
        return sequence

    @property
    def _seen_by_tower(self) -> ImageFeatures:
        assert self._images is not None, "this model sees no images, and the edge refuses them"
        return self._images

    def _measured(self) -> KnownModel:
        """Run two tokens, and keep what they show."""
        self.open(TRIED)
        self.run([Chunk(TRIED, [0, 0])])
        caches, groups = self.caches(TRIED), tuple[GroupFacts, ...]()
        if self._facts.caches:
            groups = groups_of(
                caches,
                attending=self._facts.attending_indices,
                page_token_count=page_token_count_for(self._settings.block_token_count),
            )
        known = KnownModel(self._facts, self.blocks.measure(caches, token_count=2), groups)
        end_trial(self, [TRIED])
        if self._fingerprint_hex:
            self._known[self._key] = known
        return known

    def _proof_of_replays(self, adapter: AdapterName) -> Iterator[None]:
        replays = self._pipeline.forwards[adapter].replays
        if replays.is_usable:
            yield from proving_steps(self, adapter)
            event = "replays_proved" if replays.is_proved else "replays_not_proved"
            _log.info(event, extra={"adapter": adapter})

    def warm_up_more(self) -> bool:
        self._thread.check()
        if not self._warm_ups:
            return False
        draw_batch(self, self._warm_ups.popleft())
        return bool(self._warm_ups)

    def _page(self, facts: Sequence[GroupFacts], loaded: model_loader.LoadedModel) -> Iterator[None]:
        """Put the KV of new rows into pages, if that is wanted and possible."""
        if self._settings.attention is Attention.ROWS:
            return
        head_count = model_loader.shape_of(loaded).head_count
        has_sinks = model_loader.has_sinks(loaded.model)
        backends: list[PagedAttention | None] = []
        for each in facts:
            kernels = yield from kernels_for(
                each.shape, query_head_count=head_count, has_sinks=has_sinks, proved=self._proved
            )
            backends.append(kernels)
        if not all(backends) or not backends:
            why = "no kernels are proved here" if backends else "the model's KV is not of one kind"
            _log.info("pages_unused", extra={"detail": why})
            return
        left_bytes = max(0, self._settings.memory_limit_bytes - mx.get_active_memory())
        sizes = pool_sizes(
            facts, size_bytes=int(_POOL_SHARE * left_bytes), array_limit_bytes=find_device().array_limit_bytes
        )
        if sum(sizes) and not self._settings.is_pipelined and not can_reserve(sum(sizes)):
            _log.warning("page_pool_not_reserved", extra={"size_bytes": sum(sizes)})
            sizes = [0] * len(sizes)
        chosen = [(one, kernels) for one, kernels in zip(facts, backends, strict=True) if kernels]
        self._paging = Paging(make_groups(chosen, sizes, passes=self._pass_clock))
        self.pages = PoolMemory(
            self._paging.groups, has_rows=lambda: bool(self._sequences) or self.blocks.is_restoring
        )
        self._pipeline.forwards[NO_ADAPTER].page(self._paging)
        self.blocks.page(self._paging)

    def _attended_bytes(self, kv_bytes_per_token: int, *, number_bytes: int) -> int:
        """Return what attention allocates for a token's KV in one layer."""
        if self._paging.groups:
            return kv_bytes_per_token // len(self._facts.caches)
        layer_count = self._facts.kv_count(self.fresh_caches())
        if not layer_count:
            return 0  # the model's own attention, or windows only
        return float_bytes(
            kv_bytes_per_token // layer_count,
            bits=self._settings.kv_bits,
            group_size=self._settings.kv_group_size,
            number_bytes=number_bytes,
        )

    @property
    def _joins(self) -> bool:
        return self._settings.joins_layers and not self._source.adapters

    @property
    def _key(self) -> ModelKey:
        return self._fingerprint_hex, self._joins

    def _examined(self, model: Any) -> Generator[None, None, PassFacts]:
        """Find out how passes of this model are run, and log it.

        Raises ConfigError if the KV cannot be quantized as the settings ask.
        """
        try:
            facts = yield from examine_steps(
                model,
                make_caches=self.fresh_caches,
                goes_layered=not self._settings.is_pipelined,
                join=JoinedLayers.steps if self._joins else None,
            )
        except ValueError as error:
            if not self._settings.kv_bits:
                raise
            raise ConfigError(
                Reason.CONFIG_INVALID,
                f"this model's KV cannot be quantized to {self._settings.kv_bits} bits in groups of "
                f"{self._settings.kv_group_size}: {error}; choose another kv_bits or kv_group_size",
            ) from error
        modes = ", ".join(mode.value for mode in facts.modes)
        if model_loader.needs_flat_layers(model) and facts.modes != (PassSplit.ATTENTION,):
            raise model_invalid(
                f"this model's passes are split by {modes} ({facts.reason}); only those "
                "that attention splits know where images are; is mlx-vlm a newer one than 0.7?"
            )
        if not facts.hidden_size:
            _log.info("embeddings_unavailable", extra={"detail": "the model shows no hidden states"})
        detail = {"ways": modes, "detail": facts.reason or "rows share every layer"}
        if facts.caches:
            _log.info("forward_pass_examined", extra=detail)
        else:
            _log.warning("forward_pass_not_shared", extra=detail)
        return facts
