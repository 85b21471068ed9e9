"""GpuAttention: attention over pages by custom kernels, on CUDA and Metal.

A layer takes one launch to write and attend, and one more to merge if keys are split, whatever the number of
rows. Nothing is compiled again when rows, tokens, tables or splits change. Inference thread only.

Kernels get a short view of the pool's beginning, not the pool. MLX adds up the sizes of what a command buffer
reads and ends the buffer at a limit. The pool alone exceeds that limit, so each launch would end a buffer.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.gpu import kernels, nvrtc
from icehouse_server.engine.attention.gpu.kernels import CUDA, METAL, Language
from icehouse_server.engine.attention.port import AttentionCall, Ints, Pool, PoolShape, TokenPlaces

_LANES_A_KEY = (16, 8)
"""The first that gives each lane whole vectors, or the last. With 8, a pass of 64 rows of 100 to 1,500 tokens
took 6.5 ms instead of 5.8, and of one row 2.9 instead of 2.2 (36 layers, 32 heads of 128 over 8; H100)."""
_MOST_LANE_NUMBERS = 32
"""Numbers of queries that a lane holds in registers at once, and as many of the result."""
_VECTOR_BYTES = 16
_LEAST_INPUT = 8
"""MLX passes smaller arrays to a Metal kernel in another address space, which makes it another kernel."""
_SMALLEST_SPLIT = 128
"""Keys. What splits write and the merge reads is then less than a sixteenth of the keys and values."""
_MOST_SPLITS = 32
_BLOCKS_A_CORE = 6
"""Blocks that keep a core busy: two or three run at once, the rest even out unequal rows."""
_REMEMBERED_SETTINGS = 4096

MakeKernel = Callable[..., Any]
"""mx.fast.cuda_kernel, mx.fast.metal_kernel, or what tests use instead."""
_Kernel = Callable[..., list[mx.array]]


def gpu_attentions() -> Iterator[GpuAttention]:
    """Yield kernels for the device that MLX computes on, the preferred ones first; none on a CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return
    if mx.metal.is_available():
        yield GpuAttention(mx.fast.metal_kernel, METAL)
        return
    if nvrtc.is_available():
        yield GpuAttention(nvrtc.make_kernel, CUDA)
    yield GpuAttention(mx.fast.cuda_kernel, CUDA)


def split_size(visible_counts: Ints, *, blocks_per_split: int, core_count: int) -> int:
    """Return how many keys a split takes: a power of two, so that it rarely changes as rows grow.

    A few long rows are split to use all cores; many rows only so far that the longest do not end last.
    """
    enough = int(visible_counts.sum(dtype=np.int64)) * blocks_per_split // (_BLOCKS_A_CORE * core_count)
    size = max(_SMALLEST_SPLIT, 1 << max(enough.bit_length() - 1, 0))
    while visible_counts.max() > size * _MOST_SPLITS:
        size *= 2
    return size


@dataclasses.dataclass(slots=True)
class _OnDevice:
    """Places of a pass as the kernels take them, and what was derived from them for its layers."""

    array: mx.array
    splits: dict[tuple[int, int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Keys per split and number of splits, by token count, window (0: none) and blocks per split."""
    spans: dict[tuple[int, int, int], mx.array] = dataclasses.field(default_factory=dict)
    """Spans of gathered rows as the kernel takes them, by row, first token and key count."""

    def span(self, places: TokenPlaces, row: int, first_token: int, key_count: int) -> mx.array:
        """Return where a row's pages begin in `array`, its last token, and which tokens are wanted."""
        key = (row, first_token, key_count)
        if (known := self.spans.get(key)) is not None:
            return known
        start = int(places.page_starts[row]) + 3 * places.token_count
        last = int(places.positions[places.rows == row].max())
        span = self.spans[key] = mx.array([start, last, first_token, key_count], mx.int32)
        return span


class GpuAttention:
    """`PagedAttention` for GPUs. `make_kernel` is MLX's for the language."""

    attends_to_chunks = False

    def __init__(self, make_kernel: MakeKernel, language: Language) -> None:
        self._language = language
        self._settings: dict[tuple[int, int, int, int, float, bool], mx.array] = {}
        self._block_counts: set[int] = set()
        """Blocks per token and split in all calls so far; all layers of one group have the same."""

        def kernel(name: str, inputs: str, outputs: str, source: str) -> _Kernel:
            made: _Kernel = make_kernel(
                name=f"icehouse_{name}",
                input_names=inputs.split(),
                output_names=outputs.split(),
                source=language.body_start + source,
                header=language.header,
            )
            return made

        self._write = kernel("write", "keys values pool places settings order", "new_order", kernels.WRITE)
        self._move = kernel(
            "move_pages", "content pool moves settings order", "new_order", kernels.MOVE_PAGES
        )
        self._gather = kernel(
            "gather_row", "pool places span settings order", "keys values", kernels.GATHER_ROW
        )
        attend_inputs = "queries keys values pool places settings order"
        self._attend_split = kernel(
            "attend_split", attend_inputs, "parts part_sums new_order", kernels.ATTEND_SPLIT
        )
        self._attend_whole: dict[bool, _Kernel] = {}
        self._merge: dict[bool, _Kernel] = {}
        for has_sinks, ending, sinks in ((False, "", ""), (True, "_sinks", " sinks")):
            self._attend_whole[has_sinks] = kernel(
                f"attend{ending}",
                attend_inputs + sinks,
                "out new_order",
                kernels.with_sinks(kernels.ATTEND_WHOLE, has_sinks=has_sinks),
            )
            self._merge[has_sinks] = kernel(
                f"merge{ending}",
                "parts part_sums settings" + sinks,
                "out",
                kernels.with_sinks(kernels.MERGE, has_sinks=has_sinks),
            )

    def write(self, pool: Pool, keys: mx.array, values: mx.array, places: TokenPlaces, *, layer: int) -> None:
        shape = pool.shape
        (pool.order,) = self._write(
            inputs=[
                keys.astype(shape.dtype),
                values.astype(shape.dtype),
                self._start_of(pool),
                self._on_device(places).array,
                self._settings_array(pool, layer),
                pool.order,
            ],
            template=_pool_constants(shape),
            grid=(places.token_count * kernels.THREADS, 1, 1),
            threadgroup=(kernels.THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )

    def attend(
        self,
        pool: Pool,
        queries: mx.array,
        places: TokenPlaces,
        call: AttentionCall,
        new: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        start = self._start_of(pool)
        keys, values = (start, start) if new is None else (array.astype(pool.shape.dtype) for array in new)
        token_count, head_count, _, head_size = queries.shape
        shape, has_sinks, window = pool.shape, call.sinks is not None, call.window or 0
        group = head_count // shape.kv_head_count
        division = _division(shape, group)
        blocks = shape.kv_head_count * -(-group // division["HEADS"])
        self._block_counts.add(blocks)
        on_device = self._on_device(places)
        keys_per_split, split_count = self._splits(on_device, places.positions[:token_count], window, blocks)
        sinks = [] if call.sinks is None else [call.sinks]
        settings = self._settings_array(pool, call.layer, window, keys_per_split, call.scale, new is not None)
        inputs = [queries, keys, values, start, on_device.array, settings, pool.order]
        template = [*_pool_constants(shape), ("Q", queries.dtype), ("GROUP", group), *division.items()]
        launch: dict[str, Any] = {
            "template": template,
            "grid": (token_count * kernels.THREADS, blocks, split_count),
            "threadgroup": (kernels.THREADS, 1, 1),
        }
        if split_count == 1:
            out, order = self._attend_whole[has_sinks](
                inputs=inputs + sinks,
                output_shapes=[queries.shape, (1,)],
                output_dtypes=[queries.dtype, mx.int32],
                **launch,
            )
        else:
            parts_shape = (token_count, head_count, split_count)
            *parts, order = self._attend_split(
                inputs=inputs,
                output_shapes=[(*parts_shape, head_size), (*parts_shape, 2), (1,)],
                output_dtypes=[mx.float32, mx.float32, mx.int32],
                **launch,
            )
            (out,) = self._merge[has_sinks](
                inputs=[*parts, self._settings_array(pool, split=split_count), *sinks],
                template=[("Q", queries.dtype), ("D", head_size), ("HEADS", head_count)],
                grid=(token_count * head_count * head_size, 1, 1),
                threadgroup=(head_size, 1, 1),
                output_shapes=[queries.shape],
                output_dtypes=[queries.dtype],
            )
        if new is not None:
            pool.order = order
        output: mx.array = out
        return output

    def gather_row(
        self, pool: Pool, places: TokenPlaces, *, row: int, layer: int, first_token: int, key_count: int
    ) -> tuple[mx.array, mx.array]:
        shape = pool.shape
        on_device = self._on_device(places)
        gathered_shape = (1, shape.kv_head_count, key_count, shape.head_size)
        keys, values = self._gather(
            inputs=[
                self._start_of(pool),
                on_device.array,
                on_device.span(places, row, first_token, key_count),
                self._settings_array(pool, layer),
                pool.order,
            ],
            template=_pool_constants(shape),
            grid=(-(-key_count // shape.page_token_count) * kernels.PAGE_THREADS, shape.kv_head_count, 2),
            threadgroup=(kernels.PAGE_THREADS, 1, 1),
            output_shapes=[gathered_shape, gathered_shape],
            output_dtypes=[shape.dtype, shape.dtype],
        )
        return keys, values

    def settle(self, pool: Pool) -> bool:
        # Later copies to and from freed pages are queued after the last pass, or wait for the next one.
        mx.eval(pool.order)
        mx.synchronize()
        return True

    def copy_pages(self, pool: Pool, sources: Ints, targets: Ints) -> None:
        self._move_pages(pool, self._start_of(pool), sources, targets)

    def fill_pages(self, pool: Pool, content: mx.array, pages: Ints) -> None:
        self._move_pages(pool, content, np.arange(len(pages), dtype=np.int32), pages)

    def read_pages(self, pool: Pool, pages: Ints) -> mx.array:
        return mx.take(pool.array, mx.array(pages) + pool.order, axis=0)

    def array_of(self, places: TokenPlaces) -> mx.array:
        return self._on_device(places).array

    def launch_of(self, places: TokenPlaces, window: int | None) -> Hashable:
        on_device = self._on_device(places)
        splits = [
            self._splits(on_device, places.positions, window or 0, blocks)
            for blocks in sorted(self._block_counts)
        ]
        return (on_device.array.size, *splits)

    def placed(self, places: TokenPlaces, array: mx.array) -> TokenPlaces:
        splits = self._on_device(places).splits
        return dataclasses.replace(places, derived={_OnDevice: _OnDevice(array, splits)})

    def _move_pages(self, pool: Pool, content: mx.array, sources: Ints, targets: Ints) -> None:
        if not len(targets):
            return
        moves = np.zeros(max(2 * len(targets), _LEAST_INPUT), np.int32)
        moves[0 : 2 * len(targets) : 2], moves[1 : 2 * len(targets) : 2] = sources, targets
        block_bytes = kernels.PAGE_THREADS * kernels.PAGE_VECTORS * _VECTOR_BYTES
        (pool.order,) = self._move(
            inputs=[content, self._start_of(pool), mx.array(moves), self._settings_array(pool), pool.order],
            template=_pool_constants(pool.shape),
            grid=(-(-pool.shape.page_bytes // block_bytes) * kernels.PAGE_THREADS, len(targets), 1),
            threadgroup=(kernels.PAGE_THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )

    def _start_of(self, pool: Pool) -> mx.array:
        """Return a short view of the pool's beginning, made once; a pool that grows gets another array."""
        if pool.view is None:
            pool.view = pool.array[:1, :1, :1, :1, :1, :_LEAST_INPUT]
        return pool.view

    def _on_device(self, places: TokenPlaces) -> _OnDevice:
        """Return the places in one array: one transfer, and one input of each launch."""
        known: _OnDevice | None = places.derived.get(_OnDevice)
        if known is not None:
            return known
        rows, positions = places.rows, places.positions
        first_page = 3 * places.token_count
        begins = np.zeros(places.token_count, np.int32)
        begins[1:] = np.where(rows[1:] != rows[:-1], np.arange(1, places.token_count), 0)
        numbers = np.zeros(_rounded(first_page + len(places.pages)), np.int32)
        numbers[0:first_page:3] = places.page_starts[rows] + first_page
        numbers[1:first_page:3] = positions
        numbers[2:first_page:3] = positions[np.maximum.accumulate(begins)]
        numbers[first_page : first_page + len(places.pages)] = places.pages
        on_device = places.derived[_OnDevice] = _OnDevice(mx.array(numbers))
        return on_device

    def _splits(self, on_device: _OnDevice, positions: Ints, window: int, blocks: int) -> tuple[int, int]:
        key = (len(positions), window, blocks)
        if (known := on_device.splits.get(key)) is not None:
            return known
        visible_counts = positions + 1
        if window:
            visible_counts = np.minimum(visible_counts, window)
        size = split_size(visible_counts, blocks_per_split=blocks, core_count=self._language.usual_core_count)
        splits = on_device.splits[key] = size, -(-int(visible_counts.max()) // size)
        return splits

    def _settings_array(
        self,
        pool: Pool,
        layer: int = 0,
        window: int = 0,
        split: int = 0,
        scale: float = 0.0,
        writes: bool = False,
    ) -> mx.array:
        key = (pool.shape.layer_count, layer, window, split, scale, writes)
        if (known := self._settings.get(key)) is not None:
            return known
        if len(self._settings) >= _REMEMBERED_SETTINGS:
            self._settings.clear()
        (scale_bits,) = struct.unpack("<i", struct.pack("<f", scale))
        settings = self._settings[key] = mx.array([*key[:4], scale_bits, int(writes)], mx.int32)
        return settings


def _rounded(count: int) -> int:
    """Return one of a few lengths that hold `count`, so that passes with similar page counts can be replayed
    for each other."""
    step = max(_LEAST_INPUT, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


def _pool_constants(shape: PoolShape) -> list[tuple[str, int | mx.Dtype]]:
    return [
        ("T", shape.dtype),
        ("D", shape.head_size),
        ("KV_HEADS", shape.kv_head_count),
        ("PAGE", shape.page_token_count),
    ]


def _division(shape: PoolShape, group: int) -> dict[str, int]:
    """Return how a block divides its work, as constants of the kernels."""
    number_bytes = shape.dtype.size
    whole = _VECTOR_BYTES // number_bytes
    fitting = (lanes for lanes in _LANES_A_KEY if shape.head_size % (lanes * whole) == 0)
    lanes = next(fitting, _LANES_A_KEY[-1])
    numbers = shape.head_size // lanes
    most = max(1, _MOST_LANE_NUMBERS // numbers)
    return {
        "HEADS": -(-group // -(-group // most)),  # evenly
        "LANES": lanes,
        "VECTOR": min(numbers & -numbers, whole),  # the largest power of two that divides it
        "ROUNDS": min(max(64 // (numbers * number_bytes), 1), 4),
    }
