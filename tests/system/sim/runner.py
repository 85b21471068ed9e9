"""The model's runner: it cuts caches into real bytes and restores them, as strictly as the real one."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Callable, Collection, Generator, Sequence

from icehouse_server.domain.blocks import HostRegion, HostTensor, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import ImageKey, ImagePart
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.ports import Chunk, Drawn, ImageUse, LayerSpan, MemoryUse, PassResult
from icehouse_server.engine.kv.pool_memory import PoolMemory
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, RestoreInput
from icehouse_server.errors import Reason, StorageError
from icehouse_server.storage.api import PlannedBlock

from tests.fixtures.engine import memory_model
from tests.fixtures.storage.loading import BlockBuffers
from tests.system.sim.images import vectors_of
from tests.system.sim.model import Caches, ModelSpec

_NAMES = {
    RegionKind.KV: ("000.k", "000.v"),
    RegionKind.WINDOW: ("001.k",),
    RegionKind.CHECKPOINT: ("002.state",),
}
_PADDING = "padding"
_SECOND = 0x5555555555555555
"""The second kv tensor has each row with these bits flipped."""
_FIXED_S = 0.001
_TOKEN_S = 0.0005
"""Time of a pass, and of each token in it."""
_LAYER_COUNT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class SimRegion:
    """Rows of one kind on the simulated device; a checkpoint has one."""

    kind: RegionKind
    rows: tuple[int, ...]
    padding_bytes: int = 0
    """Zeros after the rows, so that byte planes make them smaller."""
    size_bytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Computed once: every account is checked after every step, and sums these.
        row_bytes = 8 * len(self.rows) * len(_NAMES[self.kind])
        object.__setattr__(self, "size_bytes", row_bytes + self.padding_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class SimCopy:
    """A copy of regions to the host: when pipelined, the second pass from now shows that it is done."""

    runner: SimRunner
    regions: tuple[SimRegion, ...]
    done_pass: int

    @property
    def is_done(self) -> bool:
        return self.runner.pass_count >= self.done_pass

    @property
    def is_apart(self) -> bool:
        return self.runner.copies_apart

    def take(self) -> tuple[HostRegion, ...]:
        return tuple(_host_region(region) for region in self.regions)


@dataclasses.dataclass(slots=True)
class _Row:
    """One decoding sequence. When pipelined, a drawn token runs through the model before it is reported."""

    caches: Caches
    seed: int
    drawn: int


class SimRunner:
    """Implements Runner and CacheRunner. Only the number of slices of a restore is random."""

    def __init__(
        self, spec: ModelSpec, *, block_token_count: int, dice: random.Random, padding_bytes: int = 0
    ) -> None:
        """`padding_bytes` are added to every region."""
        self.spec = spec
        self._padding_bytes = padding_bytes
        self._block_token_count = block_token_count
        self._dice = dice
        self.is_pipelined = spec.weights % 2 == 1
        self._has_pages = spec.weights % 3 > 0 and spec.has_kv
        self.copies_apart = spec.weights % 4 > 1
        """Whether blocks are written from a copy, not from a view of their regions in RAM."""
        self.pages = PoolMemory()
        self.pass_count = 0
        self.open_caches: dict[SequenceId, Caches] = {}
        self.restoring: dict[SequenceId, RestoreInput] = {}
        self.decoding: dict[SequenceId, _Row] = {}
        self._vectors: dict[SequenceId, dict[ImageKey, list[int]]] = {}
        self._layered: dict[SequenceId, tuple[tuple[int, ...], int]] = {}
        """Chunks that have run through some layers, each with the next layer."""
        self._elapsed_s = 0.0

    def facts(self) -> CacheFacts:
        """Return what these caches allow."""
        spec = self.spec
        return CacheFacts(
            has_kv=spec.has_kv,
            cuttable_inside=not spec.has_state
            and spec.window_token_count not in range(1, self._block_token_count),
            needs_checkpoint=spec.has_state,
            window_token_count=spec.window_token_count,
            shares_blocks=self._has_pages,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is left on the device."""
        return not (self.open_caches or self.restoring or self.decoding)

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Generator[None, None, ModelInfo]:
        raise AssertionError("it is loaded")

    def open(self, sequence_id: SequenceId) -> None:
        assert sequence_id not in self.open_caches, sequence_id
        self.open_caches[sequence_id] = Caches(self.spec)

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        """Run a pass over every row and these chunks; when pipelined, return the last pass's tokens."""
        if before_wait is not None:
            before_wait()
        told = self._drawn()
        self.pass_count += 1
        fed_count = len(self.decoding) + sum(
            len(chunk.token_ids) * (chunk.layers.share if chunk.layers else 1.0) for chunk in chunks
        )
        assert fed_count, "a pass over nothing"
        began_s = _FIXED_S + _TOKEN_S * len(self.decoding)
        for row in self.decoding.values():
            row.caches.run(row.drawn)
            row.drawn = row.caches.draw(row.seed)
        went_through: dict[SequenceId, LayerSpan] = {}
        for chunk in chunks:
            layers = chunk.layers
            if layers is not None and not math.isinf(layers.within_s):
                last = self._dice.randint(layers.first + 1, layers.last)
                if last < layers.last:
                    layers = went_through[chunk.sequence_id] = dataclasses.replace(layers, last=last)
            if layers is None or self._is_through(chunk, layers):
                self._layered.pop(chunk.sequence_id, None)
                self._feed(chunk)
        elapsed_s, self._elapsed_s = self._elapsed_s, _FIXED_S + _TOKEN_S * fed_count
        if self.is_pipelined:
            return PassResult(told, elapsed_s=elapsed_s, is_behind=True)
        return PassResult(
            self._drawn(),
            went_through=went_through,
            layers_began_s=began_s if any(chunk.layers for chunk in chunks) else 0.0,
            elapsed_s=self._elapsed_s,
        )

    def _drawn(self) -> list[Drawn]:
        ahead = int(self.is_pipelined)
        return [Drawn(i, row.drawn, fed_ahead_count=ahead) for i, row in self.decoding.items()]

    def _is_through(self, chunk: Chunk, layers: LayerSpan) -> bool:
        """Run a chunk through some layers; return whether they are the last ones."""
        assert chunk.row is None and len(chunk.token_ids) > 1 and layers.count == _LAYER_COUNT, chunk
        if layers.first:
            assert self._layered[chunk.sequence_id] == (tuple(chunk.token_ids), layers.first), chunk
        self._layered[chunk.sequence_id] = (tuple(chunk.token_ids), layers.last)
        return layers.is_last

    def _feed(self, chunk: Chunk) -> None:
        assert chunk.token_ids, "a chunk of nothing"
        assert chunk.wanted is None and chunk.pooling is None, "no story asks for them"
        caches = self.open_caches[chunk.sequence_id]
        caches.spec = self.spec.with_adapter(chunk.adapter)
        seen = list(chunk.token_ids)
        for part in chunk.images:
            vectors = self._vectors[chunk.sequence_id][part.key]
            is_cut = part.place + part.count < len(vectors)
            assert not (is_cut and part.image.is_seen_whole), "a pass ends inside an image that is seen whole"
            seen[part.start : part.start + part.count] = vectors[part.place : part.place + part.count]
        if len(seen) > 1:
            caches.prefill(seen)
        else:
            caches.run(seen[0])
        if chunk.row is not None:
            tokens = (*chunk.row.prompt_token_ids, *chunk.row.output_token_ids)
            assert caches.position == len(tokens), "a row joins with all its input"
            seed = chunk.row.sampling.seed
            del self.open_caches[chunk.sequence_id]
            self._vectors.pop(chunk.sequence_id, None)
            self.decoding[chunk.sequence_id] = _Row(caches, seed, caches.draw(seed))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        for place in (self.open_caches, self.restoring, self.decoding, self._vectors, self._layered):
            for sequence_id in sequence_ids:
                place.pop(sequence_id, None)

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        assert sequence_id in self.open_caches, sequence_id
        if self._dice.random() < 0.5:
            return False
        self._vectors.setdefault(sequence_id, {})[image.key] = vectors_of(image.image)
        return True

    def layer_count(self) -> int:
        return 0 if self.is_pipelined else _LAYER_COUNT

    def warm_up_more(self) -> bool:
        return False

    def image_use(self) -> ImageUse:
        return ImageUse()

    def encode_bytes(self, image: ImagePart) -> int:
        return 100

    def memory_model(self) -> MemoryModel:
        return memory_model()

    def memory(self) -> MemoryUse:
        """Return ten bytes for each token of each live sequence, as in `memory_model`."""
        live = [*self.open_caches.values(), *(row.caches for row in self.decoding.values())]
        return MemoryUse(10 * sum(caches.position for caches in live), 2)

    def end_thread(self) -> None:
        """Do nothing: there are no streams."""

    def close(self) -> None:
        assert self.is_empty, "sequences were left behind"

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, SimRegion]:
        caches = self.open_caches.get(sequence_id) or self.decoding[sequence_id].caches
        assert 0 <= start < stop <= caches.position, (start, stop, caches.position)
        cuts = {}
        for kind in kinds:
            if kind is RegionKind.KV:
                rows = caches.kv[start:stop]
            elif kind is RegionKind.WINDOW:
                held_from = caches.position - len(caches.window)
                first = max(start, stop - self.spec.window_token_count)
                assert held_from <= first, f"the window of [{first}, {stop}) has passed {held_from}"
                rows = caches.window[first - held_from : stop - held_from]
            else:
                assert stop == caches.position, f"a state at {caches.position} is not one at {stop}"
                rows = [caches.state]
            cuts[kind] = SimRegion(kind, tuple(rows), self._padding_bytes)
        return cuts

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> BlockBuffers | None:
        assert self._has_pages
        return BlockBuffers(blocks) if self._dice.random() < 0.9 else None

    def end_load(self, place: BlockBuffers) -> list[SimRegion]:
        return [self.from_host(region) for region in place.regions()]

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        assert sequence_id not in self.open_caches, sequence_id
        self.restoring[sequence_id] = restore

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        if self._dice.random() < 0.3:
            return False
        restore = self.restoring.pop(sequence_id)
        self.open_caches[sequence_id] = Caches.of(
            self.spec,
            position=restore.token_count,
            kv=_joined_kv(restore) if self.spec.has_kv else (),
            window=_joined_window(restore, self.spec.window_token_count),
            state=_state(restore) if self.spec.has_state else 0,
        )
        return True

    def from_host(self, region: HostRegion) -> SimRegion:
        names = tuple(tensor.name for tensor in region.tensors)
        assert names == (*_NAMES[region.kind], *[_PADDING] * (self._padding_bytes > 0)), names
        first, *others = region.tensors[: len(_NAMES[region.kind])]
        rows = _rows_of(first)
        assert all(_rows_of(t) == [row ^ _SECOND for row in rows] for t in others)
        return SimRegion(region.kind, tuple(rows), self._padding_bytes)

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        kinds = [region.kind for region in regions]
        if self.spec.has_state or RegionKind.CHECKPOINT in kinds:
            return "a state from elsewhere"
        if self.spec.has_kv and RegionKind.KV not in kinds:
            return "it has no kv"
        for region in regions:
            is_kv = region.kind is RegionKind.KV
            row_count = token_count if is_kv else min(token_count, self.spec.window_token_count)
            expected = _host_region(SimRegion(region.kind, (0,) * row_count, self._padding_bytes))
            if [_form_of(tensor) for tensor in region.tensors] != [_form_of(t) for t in expected.tensors]:
                return f"its {region.kind} does not fit this model"
        return ""

    def begin_to_host(self, regions: Sequence[SimRegion]) -> SimCopy:
        return SimCopy(self, tuple(regions), self.pass_count + 2 * self.is_pipelined)


def _host_region(region: SimRegion) -> HostRegion:
    is_state = region.kind is RegionKind.CHECKPOINT
    shape = (1,) if is_state else (1, 1, len(region.rows), 1)
    tensors = []
    for name, bits in zip(_NAMES[region.kind], (0, _SECOND), strict=False):
        data = struct.pack(f"<{len(region.rows)}Q", *(row ^ bits for row in region.rows))
        tensors.append(HostTensor(name, "U64", shape, memoryview(data)))
    if region.padding_bytes:
        zeros = memoryview(bytes(region.padding_bytes))
        tensors.append(HostTensor(_PADDING, "U8", (region.padding_bytes,), zeros))
    return HostRegion(region.kind, tuple(tensors))


def _form_of(tensor: HostTensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype, tensor.shape


def _rows_of(tensor: HostTensor) -> list[int]:
    return list(struct.unpack(f"<{tensor.data.nbytes // 8}Q", tensor.data))


def _joined_kv(restore: RestoreInput) -> list[int]:
    """Return rows [0, token_count), from blocks without a gap."""
    rows: list[int] = []
    for block in restore.blocks:
        region = block.regions.get(RegionKind.KV)
        if region is None or block.start_token_index != len(rows):
            raise _unusable(f"kv starts at {block.start_token_index} where {len(rows)} is next")
        if len(_rows_in(region)) != block.token_count:
            raise _unusable(f"kv of {len(_rows_in(region))} tokens in a block of {block.token_count}")
        rows += _rows_in(region)
    if len(rows) < restore.token_count:
        raise _unusable(f"kv ends at {len(rows)} of {restore.token_count}")
    return rows[: restore.token_count]


def _joined_window(restore: RestoreInput, window_token_count: int) -> list[int]:
    """Return the last rows before token_count, as many as the window keeps."""
    wanted_from = restore.token_count - min(restore.token_count, window_token_count)
    rows: dict[int, int] = {}
    for block in restore.blocks:
        region = block.regions.get(RegionKind.WINDOW)
        if region is not None:
            end = block.start_token_index + block.token_count
            held = _rows_in(region)
            rows |= dict(zip(range(end - len(held), end), held, strict=True))
    try:
        return [rows[index] for index in range(wanted_from, restore.token_count)]
    except KeyError as error:
        raise _unusable(f"the window lacks token {error}") from error


def _state(restore: RestoreInput) -> int:
    for block in restore.blocks:
        region = block.regions.get(RegionKind.CHECKPOINT)
        if block.start_token_index + block.token_count == restore.token_count and region is not None:
            return _rows_in(region)[0]
    raise _unusable(f"there is no checkpoint at {restore.token_count}")


def _rows_in(region: Region) -> tuple[int, ...]:
    assert isinstance(region, SimRegion), region
    return region.rows


def _unusable(message: str) -> StorageError:
    return StorageError(Reason.STORE_UNUSABLE, message)
