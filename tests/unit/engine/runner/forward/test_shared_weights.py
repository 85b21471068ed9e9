"""Weights are read once for all rows of a pass, and the head's for the tokens that are drawn from alone."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import prompt_of

FEED_FORWARD = ("mlp", "feed_forward")
HEADS = ("lm_head", "output")
STACKED = {"qwen3_next": "linear_attn", "lfm2": "conv", "mamba2": "mixer", "falcon_h1": "mamba"}
"""What keeps states, which rows of one token run together."""


def watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Note for each module with weights how many tokens each of its calls had; a tied head is a head too."""
    names = {id(module): name for name, module in model.named_modules()}
    calls: dict[str, list[int]] = {}

    def noting(kind: Any, method: str, name_of: Any, width_dims: int) -> None:
        original = getattr(kind, method)

        def noted(self: Any, x: Any) -> Any:
            shape = x.shape[: len(x.shape) - width_dims]
            calls.setdefault(name_of(names[id(self)]), []).append(math.prod(shape))
            return original(self, x)

        monkeypatch.setattr(kind, method, noted)

    noting(Linear, "__call__", str, 1)
    noting(Embedding, "__call__", str, 0)
    noting(Embedding, "as_linear", lambda _: "lm_head", 1)
    return calls


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_chunks_and_guesses_read_each_weight_once(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(5)]
    for seed, row in enumerate(rows[:3]):
        mx.eval(forward.run(mx.array(prompt_of(9, seed)), [Share(row, 9)]).arrays)
    calls = watched(model, monkeypatch)
    shares = [
        Share(rows[0], 1, logit_count=1),
        Share(rows[1], 1, logit_count=1),
        Share(rows[2], 3, logit_count=3, may_be_taken_back=True),
        Share(rows[3], 7),  # the middle of a prompt
        Share(rows[4], 5, logit_count=1),
    ]
    mx.eval(forward.run(mx.array(prompt_of(17, 9)), shares).arrays)
    heads = [found for name, found in calls.items() if name.rpartition(".")[2] in HEADS]
    assert heads == [[6]], "one for each token that is drawn"
    shared = {
        name: found
        for name, found in calls.items()
        if "embed" in name or any(part in FEED_FORWARD for part in name.split("."))
    }
    assert len(shared) > (architecture != "mamba2"), "mamba2 has nothing but mixers"
    assert shared == {name: [17] for name in shared}
    if architecture in STACKED:
        mixers = [sorted(found) for name, found in calls.items() if STACKED[architecture] in name.split(".")]
        assert mixers and all(found == [2, 3, 5, 7] for found in mixers)
