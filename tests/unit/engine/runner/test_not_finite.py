"""Rows whose logits are no numbers: each ends alone, whatever it draws by; its company draws as before."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.errors import Reason

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import STEPS, Residues, ids, run, runner_of

BAD_TOKEN = 11
"""Its embedding is no number, so neither is anything that sees it."""
BAD_PROMPT = (20, BAD_TOKEN, *range(40, 80))
"""Longer than the others: whoever has its place next leaves some of it as it is."""
SAMPLINGS = {
    "greedy": SamplingParams(),
    "random": SamplingParams(temperature=1.0, seed=3),
    "filtered": SamplingParams(temperature=0.7, seed=3, top_p=0.9, min_p=0.01, top_k=20),
    "penalized": SamplingParams(temperature=0.7, seed=3, frequency_penalty=1.0),
    "xtc": SamplingParams(temperature=0.7, seed=3, xtc_probability=0.5, xtc_threshold=0.1),
}


def broken_model_dir(parent: Path) -> Path:
    """Write a model that gives numbers unless a prompt has the bad token."""
    folder = tiny_model_dir(parent, "llama", head_dim=32)
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    weights["model.embed_tokens.weight"][BAD_TOKEN] = math.nan
    mx.eval(weights)
    mx.save_safetensors(path, dict(weights), metadata={"format": "mlx"})
    return folder


def good(index: int) -> DecodeRow:
    tokens = tuple(20 + (index * 31 + j * 7) % 200 for j in range(5))
    return DecodeRow(SamplingParams(), prompt_token_ids=tokens)


@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_row_without_numbers_ends_alone(tmp_path: Path, is_pipelined: bool, attention: Attention) -> None:
    folder = broken_model_dir(tmp_path)
    runner = runner_of(folder, is_pipelined=is_pipelined, attention=attention)
    wanted = {i: good(i) for i in range(3)}
    alone = ids(run(runner, wanted))
    for number, sampling in enumerate(SAMPLINGS.values(), 3):
        wanted[number] = DecodeRow(sampling, prompt_token_ids=BAD_PROMPT)
    bound = Residues(length=STEPS)
    wanted[len(wanted)] = DecodeRow(SamplingParams(), prompt_token_ids=BAD_PROMPT, constraint=bound)
    drawn = run(runner, wanted, late=(1, 4))
    for number in range(3, len(wanted)):
        assert len(drawn[number]) == 1, "it ended with its first draw"
        assert drawn[number][0].error.reason is Reason.LOGITS_NOT_FINITE
    assert {number: tokens for number, tokens in ids(drawn).items() if number < 3} == alone
    assert all(token.error is None for number in range(3) for token in drawn[number])
    # Whoever has the place of such a row next finds nothing of it.
    assert ids(run(runner, {i: good(i) for i in range(3)}, late=(2,))) == alone
