"""RoPE of a pass on a CPU: the numbers of `mx.fast.rope`, from angles that all layers share."""

from __future__ import annotations

import io
import itertools
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.attention.cpu.rope import PASS_ANGLES, rope_over
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import prompt_of

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
FREQUENCIES = 1.7 * 10000.0 ** (mx.arange(0, 64, 2, dtype=mx.float32) / 64)
BASES: list[dict[str, Any]] = [{"base": 500000.0, "freqs": None}, {"base": None, "freqs": FREQUENCIES}]
KINDS = [
    pytest.param(
        dims, {"traditional": traditional, "scale": scale, **base}, id=f"{dims}-{traditional}-{scale}-{n}"
    )
    for dims, traditional, scale, (n, base) in itertools.product(
        (64, 48),
        (False, True),
        (1.0, 0.25),
        enumerate(BASES),
    )
    if dims == 64 or n == 0
]


def upstream(*arguments: Any, **options: Any) -> mx.array:
    """Do what MLX does: its function is ours where a pass has run in this process, and falls through."""
    assert not PASS_ANGLES.takes(arguments[0], options["offset"])
    return mx.fast.rope(*arguments, **options)


@pytest.mark.skipif(not ON_CPU, reason="the device has a kernel of its own")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("dims", "kind"), KINDS)
def test_numbers_are_those_of_mlx_to_the_last_bit(dims: int, kind: dict[str, Any], dtype: mx.Dtype) -> None:
    positions = mx.array([0, 7, 511, 4000, 70000], dtype=mx.int32)
    array = mx.random.normal((5, 3, 1, 64), key=mx.random.key(1)).astype(dtype)
    want = upstream(array, dims, offset=positions, **kind)
    try:
        PASS_ANGLES.begin(positions)
        got = rope_over(upstream)(array, dims, offset=positions, **kind)
    finally:
        PASS_ANGLES.end()
    assert got.dtype == want.dtype
    assert mx.array_equal(got, want)


def test_whatever_is_not_of_the_pass_goes_to_mlx() -> None:
    positions, kind = mx.array([3, 4]), {"traditional": False, "base": 10000.0, "scale": 1.0}
    rope = rope_over(upstream)
    array = mx.random.normal((2, 3, 1, 64), key=mx.random.key(1))
    longer = mx.random.normal((2, 3, 5, 64), key=mx.random.key(1))
    want = [upstream(array, 64, offset=o, **kind) for o in (3, mx.array([3, 4]))]
    want.append(upstream(longer, 64, offset=mx.array([3, 4]), **kind))
    try:
        PASS_ANGLES.begin(positions)
        got = [rope(array, 64, offset=3, **kind), rope(array, 64, offset=mx.array([3, 4]), **kind)]
        got.append(rope(longer, 64, offset=mx.array([3, 4]), **kind))
        assert not PASS_ANGLES.takes(longer, positions)
    finally:
        PASS_ANGLES.end()
    assert all(mx.array_equal(g, w) for g, w in zip(got, want, strict=True))
    assert not PASS_ANGLES.takes(array, positions), "The pass has ended"
    assert not PASS_ANGLES.takes(array, None)


@pytest.mark.skipif(not ON_CPU, reason="the device has a kernel of its own")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_a_pass_computes_the_angles_of_its_layers_once(architecture: str) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(2)]
    prompts = [prompt_of(5, 1), prompt_of(9, 2)]
    shares = [Share(row, len(prompt), logit_count=1) for row, prompt in zip(rows, prompts, strict=True)]
    output = forward.run(mx.array([token for prompt in prompts for token in prompt]), shares)
    graph = io.StringIO()
    assert output.logits is not None
    mx.export_to_dot(graph, output.logits)
    assert len(model.layers) > 1
    assert graph.getvalue().count('"Cos"') == 1, "queries and keys of all layers share them"
