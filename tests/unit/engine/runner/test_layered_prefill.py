"""A prompt goes through the layers a few in each pass beside rows that decode, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow, LayerSpan
from icehouse_server.engine.kv_cache.regions import ArrayRegion
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of

ROW, PROMPT = SequenceId(1), SequenceId(2)
TOKENS = tuple(3 + (7 * i + i * i) % 280 for i in range(60))


def opened(runner: ModelRunner, sequence_id: SequenceId, tokens: tuple[int, ...], *, done: int = 0) -> None:
    """Open a sequence and run its first tokens whole."""
    runner.open(sequence_id)
    if done:
        runner.run([Chunk(sequence_id, tokens[:done])])


def joined(runner: ModelRunner, sequence_id: SequenceId, tokens: tuple[int, ...], start: int) -> list[int]:
    """Run a prompt's end, and return what it draws in the passes after."""
    row = DecodeRow(SamplingParams(), prompt_token_ids=tokens)
    drawn = runner.run([Chunk(sequence_id, tokens[start:], row=row)]).drawn
    for _ in range(8):
        drawn += runner.run([]).drawn
    return [token.token_id for token in drawn if token.sequence_id == sequence_id]


def through(runner: ModelRunner, tokens: tuple[int, ...], cuts: tuple[int, ...]) -> list[int]:
    """Take tokens of PROMPT through the layers up to each of these; return what was drawn meanwhile."""
    count, first, drawn = runner.layer_count(), 0, []
    for last in cuts:
        chunk = Chunk(PROMPT, tokens, layers=LayerSpan(first, last, count))
        drawn += runner.run([chunk]).drawn
        first = last
    return [token.token_id for token in drawn]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("kv_bits", [0, 8])
def test_tokens_are_those_of_whole_chunks(tmp_path: Path, architecture: str, kv_bits: int) -> None:
    shape = {} if architecture == "qwen3_next" else {"head_dim": 32}
    folder = tiny_model_dir(tmp_path, architecture, **shape)
    runner = runner_of(folder, is_pipelined=False, kv_bits=kv_bits, attention=Attention.ROWS)
    count = runner.layer_count()
    assert count >= 2
    opened(runner, PROMPT, TOKENS, done=20)
    runner.run([Chunk(PROMPT, TOKENS[20:59])])
    wanted = joined(runner, PROMPT, TOKENS, 59)
    runner.release([PROMPT])
    opened(runner, ROW, TOKENS[:7])
    of_row = joined(runner, ROW, TOKENS[:7], 0)
    runner.release([ROW])
    opened(runner, ROW, TOKENS[:7])
    row = DecodeRow(SamplingParams(), prompt_token_ids=TOKENS[:7])
    began = [token.token_id for token in runner.run([Chunk(ROW, TOKENS[:7], row=row)]).drawn]
    opened(runner, PROMPT, TOKENS)
    began += [token.token_id for token in runner.run([Chunk(PROMPT, TOKENS[:20])]).drawn]
    began += through(runner, TOKENS[20:50], (1,))  # and begins anew, longer
    began += through(runner, TOKENS[20:59], tuple(range(1, count + 1)))
    assert began[: len(of_row)] == of_row[: len(began)] and len(began) >= 4
    assert joined(runner, PROMPT, TOKENS, 59) == wanted


def test_blocks_that_are_cut_on_the_way_are_those_of_before(tmp_path: Path) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "gemma3_text"), is_pipelined=False, attention=Attention.ROWS)
    opened(runner, PROMPT, TOKENS, done=32)

    def cut() -> list[bytes]:
        found = runner.blocks.cut(PROMPT, start=16, stop=32, kinds=[RegionKind.KV, RegionKind.WINDOW])
        regions = [region for region in found.values() if isinstance(region, ArrayRegion)]
        assert len(regions) == 2
        return [np.array(buffer).tobytes() for region in regions for buffer in region.buffers]

    before = cut()
    assert all(before)
    through(runner, TOKENS[32:59], tuple(range(1, runner.layer_count())))
    assert cut() == before
    # Going on whole is to begin anew.
    wanted = joined(runner, PROMPT, TOKENS, 32)
    runner.release([PROMPT])
    opened(runner, PROMPT, TOKENS, done=32)
    assert joined(runner, PROMPT, TOKENS, 32) == wanted


def test_one_that_is_released_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=False, attention=Attention.ROWS)
    opened(runner, PROMPT, TOKENS, done=20)
    wanted = joined(runner, PROMPT, TOKENS, 20)
    runner.release([PROMPT])
    runner.run([])
    used = runner.memory().active_bytes
    for _ in range(3):
        opened(runner, PROMPT, TOKENS, done=20)
        through(runner, TOKENS[20:59], (1,))
        runner.release([PROMPT])
    assert runner.memory().active_bytes <= used
    opened(runner, PROMPT, TOKENS, done=20)
    assert joined(runner, PROMPT, TOKENS, 20) == wanted


def test_layers_end_with_their_time_and_the_next_pass_goes_on(tmp_path: Path) -> None:
    """The first one runs in any case, and once nothing decodes nobody waits for them."""
    folder = tiny_model_dir(tmp_path, "llama", layer_count=4)
    runner = runner_of(folder, is_pipelined=False, attention=Attention.ROWS)
    count = runner.layer_count()
    opened(runner, PROMPT, TOKENS)
    wanted = joined(runner, PROMPT, TOKENS, 0)
    runner.release([PROMPT])
    opened(runner, ROW, TOKENS[:7])
    joined(runner, ROW, TOKENS[:7], 0)
    opened(runner, PROMPT, TOKENS)
    for first in range(2):
        asked = LayerSpan(first, count, count, within_s=0.0)
        result = runner.run([Chunk(PROMPT, TOKENS[:59], layers=asked)])
        assert [token.sequence_id for token in result.drawn] == [ROW]
        assert result.went_through == {PROMPT: LayerSpan(first, first + 1, count)}
    result = runner.run([Chunk(PROMPT, TOKENS[:59], layers=LayerSpan(2, count, count, within_s=1e9))])
    assert result.went_through == {}, "as far as was asked"
    assert joined(runner, PROMPT, TOKENS, 59) == wanted
    runner.release([ROW, PROMPT])
    opened(runner, PROMPT, TOKENS)
    result = runner.run([Chunk(PROMPT, TOKENS[:59], layers=LayerSpan(0, count, count, within_s=0.0))])
    assert result.went_through == {}
    assert joined(runner, PROMPT, TOKENS, 59) == wanted
