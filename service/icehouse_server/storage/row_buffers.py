"""Row buffers: memory for the kv of consecutive blocks, one buffer per tensor, a row for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod

import numpy as np

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.storage.api import NewRows, TensorShape, UnfitLayout

_TOKEN_AXIS = -2
_ALIGNMENT_BYTES = 64


def empty_bytes(size_bytes: int) -> memoryview:
    """Return an uninitialised flat buffer of format "B"."""
    return np.empty(size_bytes, dtype=np.uint8).data


@dataclasses.dataclass(frozen=True, slots=True)
class RowBuffers:
    """A `KvPlace`. `tensors` are each [..., capacity, width]; those without bytes are passed over."""

    tensors: tuple[HostTensor, ...]
    rows: NewRows

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            count = tensor.shape[_TOKEN_AXIS]
            assert count == self.rows.capacity_token_count, f"{tensor.name} has {count} rows"

    @classmethod
    def like(cls, tensors: Sequence[TensorShape], rows: NewRows) -> RowBuffers:
        """Return buffers for blocks whose kv tensors are like these. Raises `UnfitLayout` for one without a
        token axis."""
        shapes = []
        for tensor in tensors:
            if len(tensor.shape) < 2:
                raise UnfitLayout(f"{tensor.name} of shape {tensor.shape} has no token axis")
            shapes.append((*tensor.shape[:_TOKEN_AXIS], rows.capacity_token_count, tensor.shape[-1]))
        # One allocation for all: the system backs a large one with large pages, which fault rarely.
        sizes = [prod(shape) * _item_bytes(t) for t, shape in zip(tensors, shapes, strict=True)]
        whole = empty_bytes(sum(size + -size % _ALIGNMENT_BYTES for size in sizes))
        made, begin = [], 0
        for tensor, shape, size_bytes in zip(tensors, shapes, sizes, strict=True):
            made.append(HostTensor(tensor.name, tensor.dtype, shape, whole[begin : begin + size_bytes]))
            begin += size_bytes + -size_bytes % _ALIGNMENT_BYTES
        return cls(tuple(made), rows)

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        """Return where a block's bytes go; rows beyond capacity go nowhere. Raises `UnfitLayout`."""
        capacity = self.rows.capacity_token_count
        first_row = start_token_index - self.rows.origin_token_index
        placed_rows = min(token_count, capacity - first_row)
        assert first_row >= 0 and placed_rows > 0, (
            f"Rows {first_row}+{token_count} lie outside of the buffers"
        )
        if len(tensors) != len(self.tensors):
            raise UnfitLayout(f"{len(tensors)} kv tensors, not {len(self.tensors)}")
        segments: list[memoryview] = []
        for source, target in zip(tensors, self.tensors, strict=True):
            _check_alike(source, target, token_count=token_count)
            if target.data.nbytes == 0:
                continue
            row_bytes = target.data.nbytes // prod(target.shape[:-1])
            size_bytes, stride_bytes = placed_rows * row_bytes, capacity * row_bytes
            begins = range(first_row * row_bytes, target.data.nbytes, stride_bytes)
            placed = [target.data[begin : begin + size_bytes] for begin in begins]
            if placed_rows == token_count:
                segments += placed
            else:
                # A buffer of its own each time: parts are hashed only after several were read.
                rest_bytes = (token_count - placed_rows) * row_bytes
                segments += [part for head in placed for part in (head, empty_bytes(rest_bytes))]
        return segments


def _item_bytes(tensor: TensorShape) -> int:
    count = prod(tensor.shape)
    return tensor.size_bytes // count if count else 0


def _check_alike(source: TensorShape, target: HostTensor, *, token_count: int) -> None:
    wanted = (*target.shape[:_TOKEN_AXIS], token_count, target.shape[-1])
    if (source.name, source.dtype, source.shape) != (target.name, target.dtype, wanted):
        raise UnfitLayout(
            f"{source.name} {source.dtype}{source.shape} does not continue "
            f"{target.name} {target.dtype}{target.shape}"
        )
