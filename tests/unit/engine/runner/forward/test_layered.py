"""Chunks that go through the layers a few in each pass: what they leave behind, and where they end early."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import class_of, leaves
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from icehouse_server.engine.runner.forward.splits import NotSplittable
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import prompt_of
from tests.unit.engine.runner.forward.small_models import SCHEDULE, small_model


def row_of(model: Any, forward: ForwardPass, prompt: list[int]) -> Row:
    row = Row(make_prompt_cache(model))
    mx.eval(forward.run(mx.array(prompt), [Share(row, len(prompt))]).arrays)
    return row


def held_of(row: Row) -> list[np.ndarray]:
    """Return what a row's caches hold: of all tokens that are there, or a state as it is."""
    arrays: list[mx.array] = []
    for leaf in leaves(row.caches):
        entry = class_of(leaf)
        if entry.kind is RegionKind.CHECKPOINT:
            arrays += [array for _, array in entry.whole(leaf)]
        else:
            held = entry.tokens(leaf)
            arrays += [array for _, array in held.cut(held.end - held.count, held.end)]
    return [np.array(array.astype(mx.float32)) for array in arrays]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_caches_are_those_of_a_chunk_that_went_through_all_layers(architecture: str) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    prompt, more = prompt_of(30, 1), prompt_of(21, 2)
    whole, layered = row_of(model, forward, prompt), row_of(model, forward, prompt)
    mx.eval(forward.run(mx.array(more), [Share(whole, len(more))]).arrays)
    chunk = forward.begin_layers(layered, more)
    for last in range(1, forward.facts.layer_count + 1):
        assert layered.token_count == 30
        mx.eval(forward.run_layers(chunk, last))
    assert layered.token_count == whole.token_count == 51
    for ours, theirs in zip(held_of(layered), held_of(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whoever_looks_at_the_row_on_the_way_sees_what_was_there_before(architecture: str) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    row = row_of(model, forward, prompt_of(70, 1))
    before = held_of(row)
    assert before
    chunk = forward.begin_layers(row, prompt_of(40, 2))
    for last in range(1, forward.facts.layer_count):
        mx.eval(forward.run_layers(chunk, last))
        for now, then in zip(held_of(row), before, strict=True):
            assert np.array_equal(now, then)
    assert row.token_count == 70


def test_a_row_that_went_on_meanwhile_is_found_out() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    row = row_of(model, forward, prompt_of(9, 1))
    chunk = forward.begin_layers(row, prompt_of(8, 2))
    forward.run_layers(chunk, 1)
    forward.run(mx.array([5]), [Share(row, 1)])
    with pytest.raises(AssertionError, match="went on while a chunk"):
        forward.run_layers(chunk, forward.facts.layer_count)


def test_one_token_does_not_go_so() -> None:
    """Windows write a single token into their own arrays, in the place of the oldest."""
    model = build("gemma3_text")
    forward = ForwardPass(model, examine(model))
    with pytest.raises(AssertionError, match="one token"):
        forward.begin_layers(row_of(model, forward, [5, 6]), [7])


def test_nothing_behind_the_last_layer_of_a_pass_is_computed() -> None:
    """Neither the layers to come nor the head: what is built of them depends on nothing that is asked for."""
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    row = row_of(model, forward, prompt_of(9, 1))
    for name, array in list(leaf_parameters(model)):
        if "layers.1." in name or "lm_head" in name:
            array[:] = mx.array(float("nan"))
    chunk = forward.begin_layers(row, prompt_of(8, 2))
    (hidden,) = forward.run_layers(chunk, 1)
    assert bool(mx.isfinite(hidden).all().item()) and hidden.shape[:2] == (8, 1)


def leaf_parameters(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    found: Any = tree_flatten(model.parameters())
    return list(found)


@pytest.mark.parametrize("architecture", ["gemma3n", "rwkv7"])
def test_layers_that_share_more_than_hidden_states_run_together(architecture: str) -> None:
    model = small_model(architecture)
    facts = examine(model, schedule=SCHEDULE)
    assert facts.caches and not facts.layer_count
    forward = ForwardPass(model, facts)
    row = Row(make_prompt_cache(model))
    chunk = forward.begin_layers(row, [5, 6, 7])
    with pytest.raises(AssertionError, match="run together"):
        forward.run_layers(chunk, 1)


def test_a_layer_that_comes_twice_is_refused() -> None:
    from icehouse_server.engine.runner.forward.model_seam import LayerWindow

    model = build("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(NotSplittable, match="twice"):
        LayerWindow(model)
