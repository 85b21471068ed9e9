"""LoRA layers of a sharded model: the parts of all ranks are the whole layer, however it is divided."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.runner.forward.sharded_adapters import SummedLinear, TakenAdapters
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

WORLD, WIDTH, EXPERTS = 2, 64, 3


class Group:
    """Two ranks; weights are divided without talking to them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return WORLD


class Layers(Module):
    """A layer of each kind that models have, with weights that are the same each time."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(3)
        self.fused = Linear(WIDTH, 3 * WIDTH, bias=True)
        self.out = Linear(WIDTH, WIDTH, bias=True)
        self.inner = Linear(WIDTH, WIDTH, bias=False)
        self.repeated = Linear(WIDTH, WIDTH // 2, bias=False)
        self.alike = Linear(WIDTH, WIDTH, bias=True)
        self.up = SwitchLinear(WIDTH, WIDTH, EXPERTS)
        self.down = SwitchLinear(WIDTH, WIDTH, EXPERTS)

    def shard(self, group: Any) -> None:
        self.fused = shard_linear(self.fused, "all-to-sharded", segments=3, group=group)
        self.out = shard_linear(self.out, "sharded-to-all", group=group)
        shard_inplace(self.inner, "sharded-to-all", group=group)
        # As a head of KV that several ranks have.
        rows = {name: mx.concatenate([each, each]) for name, each in self.repeated.parameters().items()}
        self.repeated.update(rows)
        self.repeated = shard_linear(self.repeated, "all-to-sharded", group=group)
        shard_inplace(self.up, "all-to-sharded", group=group)
        shard_inplace(self.down, "sharded-to-all", group=group)


def adapted(bits: int | None) -> Any:
    model: Any = Layers()
    if bits is not None:
        quantize(model, group_size=32, bits=bits)
    for name, layer in dict(model.children()).items():
        kind: Any = LoRASwitchLinear if name in ("up", "down") else LoRALinear
        lora = kind.from_base(layer, r=4, scale=2.0)
        lora.lora_b = mx.random.normal(lora.lora_b.shape)
        model[name] = lora
    return model


def share(rank: int, bits: int | None) -> Any:
    model, group = adapted(bits), Group(rank)
    taken = TakenAdapters(model)
    model.shard(group)
    taken.put_back(model, taken.uncount(model), group)
    return model


@pytest.mark.parametrize("bits", [None, 4])
def test_the_parts_together_are_the_whole_layer(bits: int | None) -> None:
    whole, parts = adapted(bits), [share(rank, bits) for rank in range(WORLD)]
    x, experts = mx.random.normal([2, WIDTH]), mx.array([[0], [2]])
    halves, expanded = mx.split(x, WORLD, axis=-1), mx.expand_dims(x, (-2, -3))
    expanded_halves = mx.split(expanded, WORLD, axis=-1)

    def near(got: mx.array, wanted: mx.array) -> bool:
        return got.shape == wanted.shape and bool(mx.allclose(got, wanted, atol=1e-4).item())

    rows = [mx.split(part.fused(x), 3, axis=-1) for part in parts]
    assert near(
        mx.concatenate([rows[rank][one] for one in range(3) for rank in range(WORLD)], -1), whole.fused(x)
    )
    assert all(isinstance(part.out, SummedLinear) for part in parts)
    assert near(
        sum(p.out.lora(half) for p, half in zip(parts, halves, strict=True)) + parts[0].out.bias, whole.out(x)
    )
    assert near(sum(part.inner(half) for part, half in zip(parts, halves, strict=True)), whole.inner(x))
    for part in parts:
        assert near(part.repeated(x), whole.repeated(x))
        assert near(part.alike(x), whole.alike(x))
    ups = [part.up(expanded, experts) for part in parts]
    assert near(mx.concatenate(ups, axis=-1), whole.up(expanded, experts))
    downs = [part.down(half, experts) for part, half in zip(parts, expanded_halves, strict=True)]
    # Each rank adds the whole bias here, which a model must divide.
    assert near(
        sum(downs) - mx.expand_dims(whole.down.linear.bias[experts], -2), whole.down(expanded, experts)
    )


def test_parts_that_are_not_the_ranks_are_refused_by_name() -> None:
    model, group = adapted(None), Group(0)
    taken = TakenAdapters(model)
    model.inner.weight = model.inner.weight[:, : WIDTH // 4]
    with pytest.raises(ValueError, match="inner: its shard has 16 of 64"):
        taken.put_back(model, taken.uncount(model), group)


def test_divided_experts_are_refused_by_name() -> None:
    model, group = adapted(None), Group(0)
    taken = TakenAdapters(model)
    model.up.weight = model.up.weight[:1]
    with pytest.raises(ValueError, match="up: its experts are divided"):
        taken.put_back(model, taken.uncount(model), group)


def test_rows_that_no_bias_counts_are_refused_by_name() -> None:
    model, group = adapted(None), Group(0)
    taken = TakenAdapters(model)
    model.inner.weight = model.inner.weight[: WIDTH // 2]
    with pytest.raises(ValueError, match="inner: its rows are not sharded with its bias"):
        taken.put_back(model, taken.uncount(model), group)
