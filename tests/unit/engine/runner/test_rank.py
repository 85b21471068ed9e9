"""A rank's share of a model: what mlx-lm can shard, or would shard wrongly, and what the ranks compare."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.llama
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.ids import AdapterName, SequenceId
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.kv.pool import PassClock
from icehouse_server.engine.runner.decoding import DispatchedPass, OpenSequence
from icehouse_server.engine.runner.forward.forward_pass import PassOutput
from icehouse_server.engine.runner.forward.row import Row, Share
from icehouse_server.engine.runner.pipeline import Pipeline
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.errors import ModelError, Unavailable
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from tests.fixtures.models import build
from tests.fixtures.models.configs import ARCHITECTURES, SHARDED

SHARDABLE = [
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v41",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "iquestloopcoder",
    "kimi_k25",
    "kimi_k3",
    "llama",
    "longcat_flash",
    "longcat_flash_ngram",
    "minimax",
    "minimax_m3_vl",
    "ministral3",
    "mistral4",
    "muse_spark",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "step3p5",
]
"""Modules of mlx-lm whose model has `shard`. Those in `SHARDED` are tried; for a new one try it, too."""


class Group:
    """As many ranks as it says; weights are divided without talking to them."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


def rank_of(group: Any) -> Rank:
    rank = Rank(lambda: contextlib.nullcontext("any"))
    rank._group = group
    return rank


def sharded(model: Any, *, rank: int = 0, world: int = 2) -> Any:
    rank_of(Group(rank, world)).shard(model)
    return model


def size_of(model: Any) -> int:
    flat: Any = tree_flatten(model.parameters())
    return sum(array.size for _, array in flat)


def test_these_models_can_be_sharded() -> None:
    folder = Path(mlx_lm.models.llama.__file__).parent
    found = [path.stem for path in sorted(folder.glob("*.py")) if re.search(r"def shard\(", path.read_text())]
    assert found == SHARDABLE
    assert set(SHARDED) <= set(found)


@pytest.mark.parametrize("architecture", SHARDED)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_of_the_weights(architecture: str, rank: int) -> None:
    whole = size_of(build(architecture))
    part = size_of(sharded(build(architecture), rank=rank))
    assert whole / 2 <= part < whole


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(SHARDED)))
def test_what_cannot_be_sharded_is_refused(architecture: str) -> None:
    with pytest.raises(ModelError, match=r"cannot shard this model|shards no weight"):
        sharded(build(architecture))


@pytest.mark.parametrize("architecture", SHARDED)
def test_heads_that_the_ranks_do_not_divide_are_refused(architecture: str) -> None:
    # Their widths together can be divided, so that nothing else would notice.
    model = build(architecture, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    if architecture == "deepseek_v3":
        model = build(architecture, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ModelError, match=r"cannot be sharded over 2 ranks: .*heads"):
        sharded(model)


def test_fewer_heads_of_kv_than_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="n_kv_heads is 2"):
        sharded(build("llama"), world=4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "ministral3", "qwen3"])
def test_widths_that_the_ranks_do_not_divide_are_refused(architecture: str) -> None:
    with pytest.raises(ModelError, match="cannot be sharded over 2 ranks"):
        sharded(build(architecture, intermediate_size=97))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_widths_of_experts_that_the_ranks_do_not_divide_are_refused(architecture: str) -> None:
    key = "intermediate_size" if architecture == "gpt_oss" else "moe_intermediate_size"
    with pytest.raises(ModelError, match="cannot be sharded over 2 ranks"):
        sharded(build(architecture, **{key: 33}))


def test_quantized_widths_that_the_ranks_do_not_divide_are_refused() -> None:
    model = build("llama")  # its 96 wide rows are three groups of 32
    quantize(model, group_size=32, bits=4)
    with pytest.raises(ModelError, match="cannot be sharded over 2 ranks"):
        sharded(model)


def alone() -> Rank:
    return rank_of(mx.distributed.init())


def test_equal_logits_do_not_differ() -> None:
    rank = alone()
    rank.check(rank.deviation(mx.random.normal([3, 50])))
    rank.check(rank.deviation(mx.zeros([3, 50])))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_no_disagreement(wrong: float) -> None:
    rank = alone()
    logits = mx.concatenate([mx.random.normal([2, 50]), mx.full([1, 50], wrong)])
    rank.check(rank.deviation(logits))
    rank.check(rank.deviation(mx.full([1, 50], wrong)))


def test_logits_that_differ_end_the_group() -> None:
    rank = alone()
    rank.check(mx.array(0.01))
    for share in (0.03, float("nan")):
        with pytest.raises(Unavailable, match="the ranks' logits differ"):
            rank.check(mx.array(share))


def test_rank_0_draws_for_all() -> None:
    drawn = mx.array([5, 7], dtype=mx.uint32)
    assert alone().share(drawn).tolist() == [5, 7]


class NotingForward:
    """A forward pass that notes when it is built, and whose output notes when it is computed."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def run(self, token_ids: mx.array, shares: Sequence[Share]) -> PassOutput:
        self._events.append(f"{self._name} built")
        return PassOutput(None, ((0, 0),), None, ((0, 0),), [self._name])


def test_each_adapter_s_pass_is_dispatched_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(DispatchedPass, "dispatch", lambda self: events.append(f"{self.arrays} dispatched"))
    monkeypatch.setattr(DispatchedPass, "wait", lambda self: None)
    monkeypatch.setattr(DispatchedPass, "_drop_arrays", lambda self: None)
    pipeline = Pipeline(
        is_pipelined=False,
        clock=SystemClock(),
        pass_clock=PassClock(),
        device_clock=DeviceClock(),
        rank=alone(),
    )
    parts = []
    for number, name in enumerate(("one", "two")):
        forward: Any = NotingForward(name, events)
        pipeline.forwards[AdapterName(name)] = forward
        sequence = OpenSequence(SequenceId(number), Row([]), AdapterName(name))
        parts.append((sequence, Chunk(SequenceId(number), [3, 4], AdapterName(name))))
    pipeline.run(parts)
    assert events[:3] == ["one built", "['one'] dispatched", "two built"]
