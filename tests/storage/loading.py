"""Requests for loads, and the proof that what came back is what was spilled."""

from __future__ import annotations

import dataclasses

import numpy as np
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.storage.loads import Loaded, LoadId, LoadRequest, PlannedBlock


def plan(blocks, *, last_token_count=None, regions=None, capacity=64, origin=None) -> LoadRequest:
    planned = []
    for block in blocks:
        kinds = frozenset(region.kind for region in block.regions) if regions is None else regions
        planned.append(PlannedBlock(block.header, kinds, block.header.token_count))
    if last_token_count is not None:
        planned[-1] = dataclasses.replace(planned[-1], token_count=last_token_count)
    start = blocks[0].header.start_token_index if origin is None else origin
    return LoadRequest(LoadId(7), tuple(planned), start, capacity, beside_decode=False)


def assert_holds(loaded: Loaded, blocks: list[HostBlock], *, origin=0, capacity=64) -> None:
    """Compare every assembled row and every other region with what was spilled, byte by byte."""
    for number, assembled in enumerate(loaded.tensors):
        itemsize = assembled.data.nbytes // int(np.prod(assembled.shape))
        shape = (*assembled.shape[:-1], assembled.shape[-1] * itemsize)
        rows = np.frombuffer(assembled.data, np.uint8).reshape(shape)
        for block in blocks:
            source = block.regions[0].tensors[number]
            assert (source.name, source.dtype) == (assembled.name, assembled.dtype)
            begin = block.header.start_token_index - origin
            count = min(block.header.token_count, capacity - begin)
            wanted = np.frombuffer(source.data, np.uint8).reshape((*source.shape[:-1], -1))
            assert np.array_equal(rows[:, :, begin : begin + count], wanted[:, :, :count])
    for block, got in zip(blocks, loaded.blocks, strict=True):
        others = {region.kind: region for region in block.regions[1:]}
        assert got.header == block.header
        for region in got.regions:
            for tensor, original in zip(region.tensors, others[region.kind].tensors, strict=True):
                assert (tensor.name, tensor.dtype, tensor.shape) == (
                    original.name,
                    original.dtype,
                    original.shape,
                )
                assert tensor.data == original.data
