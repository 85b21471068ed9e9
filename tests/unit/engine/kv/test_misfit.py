"""Blocks from elsewhere: what this model cut fits, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.kv.runner_blocks import RunnerBlocks
from icehouse_server.engine.runner.forward.splits import Attention

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of

PROMPT = tuple(3 + j * 7 % 290 for j in range(20))
KINDS = {
    "llama": [RegionKind.KV],
    "gemma3_text": [RegionKind.KV, RegionKind.WINDOW],
    "deepseek_v3": [RegionKind.KV],
}


def cut(folder: Path, kinds: list[RegionKind], *, stop: int) -> tuple[RunnerBlocks, tuple[HostRegion, ...]]:
    """Return a runner's blocks, and the first block of a prompt."""
    runner = runner_of(folder, is_pipelined=False, attention=Attention.AUTO)
    sequence_id = SequenceId(1)
    runner.open(sequence_id)
    runner.run([Chunk(sequence_id, PROMPT[:stop], row=DecodeRow(SamplingParams(), prompt_token_ids=PROMPT))])
    runner.run([])
    found = runner.blocks.cut(sequence_id, start=0, stop=stop, kinds=kinds)
    return runner.blocks, runner.blocks.begin_to_host([found[kind] for kind in kinds]).take()


def with_first(regions: tuple[HostRegion, ...], **changes: object) -> tuple[HostRegion, ...]:
    """Return regions with another first tensor."""
    first, *others = regions[0].tensors
    changed = dataclasses.replace(first, **changes)  # type: ignore[arg-type]
    return (HostRegion(regions[0].kind, (changed, *others)), *regions[1:])


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("stop", [16, 5])
def test_what_the_model_cut_fits_and_what_is_like_it_does_not(
    tmp_path: Path, architecture: str, stop: int
) -> None:
    blocks, regions = cut(tiny_model_dir(tmp_path, architecture), KINDS[architecture], stop=stop)
    assert blocks.misfit(regions, token_count=stop) == ""
    first = regions[0].tensors[0]
    one, heads, tokens, width = first.shape
    for hostile in (
        with_first(regions, name="000.x"),
        with_first(regions, dtype="I32"),
        with_first(regions, shape=(one, heads * 2, tokens, width)),
        with_first(regions, shape=(one, heads, tokens, width + 1)),
        with_first(regions, shape=(heads, one, tokens, width), name="000.z"),
        with_first(regions, shape=(one * heads * tokens * width,)),
        (HostRegion(regions[0].kind, regions[0].tensors[1:]), *regions[1:]),
        (HostRegion(regions[0].kind, regions[0].tensors[::-1]), *regions[1:]),
        (),
    ):
        assert blocks.misfit(hostile, token_count=stop), hostile
    assert blocks.misfit(regions, token_count=stop - 1)
    extra = HostRegion(RegionKind.CHECKPOINT, (HostTensor("x", "U8", (1,), memoryview(b"1")),))
    assert blocks.misfit((*regions, extra), token_count=stop)


def test_states_are_not_taken_from_a_caller(tmp_path: Path) -> None:
    kinds = [RegionKind.KV, RegionKind.CHECKPOINT]
    blocks, regions = cut(tiny_model_dir(tmp_path, "lfm2"), kinds, stop=16)
    assert "states" in blocks.misfit(regions, token_count=16)
    assert "states" in blocks.misfit(regions[:1], token_count=16)
