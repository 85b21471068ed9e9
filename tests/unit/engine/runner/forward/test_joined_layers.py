"""Layers that read the same input, computed as one product."""

from __future__ import annotations

import gc
import io
import itertools
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.joined_layers import JoinedLayers
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.at_once import examine
from tests.fixtures.steps import whole
from tests.unit.engine.runner.forward.company import prompt_of

_WIDTH = 64


class Mlp(Module):
    """Two layers of one input."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(_WIDTH, 96, bias=bias)
        self.up_proj = Linear(_WIDTH, 128, bias=bias)

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self.gate_proj(x), self.up_proj(x)]


def inputs(count: int) -> mx.array:
    return mx.random.normal((count, 1, _WIDTH), key=mx.random.key(3))


def product_count(*arrays: mx.array) -> int:
    """Return how many matrix products arrays are made of that were not evaluated yet."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("Matmul")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_joined_layers_give_what_each_gives_alone(bias: bool, is_quantized: bool) -> None:
    mlp = Mlp(bias=bias)
    if is_quantized:
        quantize(mlp, group_size=32, bits=4)
    x = inputs(5)
    alone = mlp(x)
    mx.eval(alone)
    assert len(whole(JoinedLayers.steps(mlp))) == 1
    for ours, wanted in zip(mlp(x), alone, strict=True):
        assert mx.allclose(ours, wanted, atol=1e-5)


def test_they_are_one_product_for_several_rows_and_their_own_for_one() -> None:
    mlp = Mlp()
    whole(JoinedLayers.steps(mlp))
    assert product_count(*mlp(inputs(5))) == 1
    assert product_count(*mlp(inputs(1))) == 2


def test_weights_are_in_memory_once() -> None:
    mlp = Mlp()
    mx.eval(mlp.parameters())
    weight_bytes = mlp.gate_proj.weight.nbytes + mlp.up_proj.weight.nbytes
    gc.collect()  # what other tests left is not freed meanwhile
    before = mx.get_active_memory()
    joined = whole(JoinedLayers.steps(mlp))
    assert len(joined) == 1 and mx.get_active_memory() - before < weight_bytes // 2


def test_a_layer_that_gets_another_input_computes_by_itself() -> None:
    mlp = Mlp()
    x, other = inputs(5), inputs(5) + 1.0
    wanted = mlp.gate_proj(x), mlp.up_proj(other), mlp.gate_proj(x)
    mx.eval(wanted)
    whole(JoinedLayers.steps(mlp))
    found = mlp.gate_proj(x), mlp.up_proj(other), mlp.gate_proj(x)
    for ours, alone in zip(found, wanted, strict=True):
        assert mx.allclose(ours, alone, atol=1e-5)


def test_layers_of_different_kinds_are_not_joined() -> None:
    mlp = Mlp()
    mlp.up_proj = mlp.up_proj.to_quantized(group_size=32, bits=4)
    assert len(whole(JoinedLayers.steps(mlp))) == 0
    mlp = Mlp()
    mlp.up_proj = Linear(_WIDTH, 128)  # with a bias
    assert len(whole(JoinedLayers.steps(mlp))) == 0


def test_other_models_have_their_turn_after_each_product() -> None:
    model = build("qwen3")
    steps, seen = JoinedLayers.steps(model), []
    for _ in steps:
        modules = [module for _, module in model.named_modules()]
        seen.append(sum("joined" in getattr(module, "_forward_purposes", ()) for module in modules))
    # Queries, keys and values of a layer, then the halves of its MLP.
    assert sorted(b - a for a, b in itertools.pairwise([0, *seen])) == sorted([2, 3] * len(model.layers))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_gives_what_it_gave(architecture: str) -> None:
    model = build(architecture)
    prompt = mx.array(prompt_of(5, 1))[None]
    alone = model(prompt, cache=make_prompt_cache(model))
    mx.eval(alone)
    joined = whole(JoinedLayers.steps(model))
    assert mx.allclose(model(prompt, cache=make_prompt_cache(model)), alone, atol=1e-4)
    joined.separate()
    assert mx.allclose(model(prompt, cache=make_prompt_cache(model)), alone, atol=1e-5)


def test_rows_of_a_joined_model_take_fewer_products() -> None:
    counts = []
    for join in (None, JoinedLayers.steps):
        model = build("qwen3")
        forward = ForwardPass(model, examine(model, goes_layered=False, join=join))
        output = forward.run(mx.array([5, 6, 7]), [Share(Row(make_prompt_cache(model)), 3, logit_count=1)])
        counts.append(product_count(output.logits))
    assert counts[0] - counts[1] == 3 * len(model.layers)  # three are one, and two are one


class ChangesItsInput(Module):
    """What no model does: the second layer reads another input by the same name."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        x += 1.0
        return self.down_proj(silu(gate) * self.up_proj(x))


def test_a_model_that_joining_would_change_is_left_as_it_is() -> None:
    model = build("llama")
    for layer in model.layers:
        layer.mlp = ChangesItsInput(layer.mlp)
    prompt = mx.array(prompt_of(5, 1))[None]
    alone = model(prompt, cache=make_prompt_cache(model))
    mx.eval(alone)
    facts = examine(model, join=JoinedLayers.steps)
    assert facts.caches, "its rows share a pass all the same"
    assert mx.allclose(model(prompt, cache=make_prompt_cache(model)), alone, atol=1e-5)
