"""What passes change in a model, and what goes on as before: adapters, lazy tokens, ordinary calls."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.model_seam import attention_over
from icehouse_server.engine.runner.forward.row import Row, Share
from icehouse_server.engine.runner.forward.splits import CacheSplit, NotSplittable, PassFacts
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import base, qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.fixtures.models import build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of


def guests_of(model: Any, count: int = 3) -> list[Guest]:
    found = []
    for number in range(count):
        prompt = prompt_of(11 + 9 * number, number)
        tokens, logits = alone(model, prompt, 8)
        found.append(Guest(prompt, tokens, logits, Row(make_prompt_cache(model)), list(prompt)))
    return found


def with_adapter(model: Any, tree: Any) -> Any:
    """Return `tree` over the arrays of `model`, with adapter layers of its own."""
    tree.update(model.parameters())
    linear_to_lora_layers(tree, 3, {"rank": 4, "scale": 4.0, "dropout": 0.0})
    random = np.random.default_rng(5)

    def noise(name: str, value: mx.array) -> mx.array:
        if not name.endswith(("lora_a", "lora_b")):
            return value
        return mx.array(random.standard_normal(value.shape).astype(np.float32) / np.sqrt(value.shape[-1]))

    tree.update(tree_map_with_path(noise, tree.parameters()))
    tree.eval()
    return tree


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_each_adapter_is_a_tree_with_passes_of_its_own(architecture: str) -> None:
    model = build(architecture)
    plain = ForwardPass(model, examine(model))
    adapted_tree = with_adapter(model, build(architecture))
    adapted = ForwardPass(adapted_tree, examine(adapted_tree))
    shared = {id(array) for array in _arrays(model)}
    assert any(id(array) in shared for array in _arrays(adapted_tree))
    told = []
    for forward, tree in ((plain, model), (adapted, adapted_tree), (plain, model)):
        guests = guests_of(tree)
        Company(forward, seed=2, guesses=True).run(guests)
        assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
        told.append([guest.drawn for guest in guests])
    assert told[0] == told[2] != told[1], "The adapter changes nothing"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "mamba2", "llama4"])
def test_the_next_pass_is_built_on_tokens_not_drawn_yet(architecture: str) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    prompts = [prompt_of(length, length) for length in (9, 30)]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    shares = [Share(row, len(prompt), logit_count=1) for row, prompt in zip(rows, prompts, strict=True)]
    output = forward.run(mx.array([token for prompt in prompts for token in prompt]), shares)
    drawn = []
    for _ in range(6):
        assert output.logits is not None
        drawn.append(mx.argmax(output.logits, axis=-1))
        mx.async_eval(drawn[-1], output.arrays)
        output = forward.run(drawn[-1], [Share(row, 1, logit_count=1) for row in rows])
    got = mx.stack(drawn, axis=1).tolist()
    assert got == [alone(model, prompt, 6)[0] for prompt in prompts]


def test_the_model_stays_what_it_was_for_everybody_else() -> None:
    model = build("qwen3_next")
    kinds = [type(module) for _, module in model.named_modules()]
    facts = examine(model)
    ForwardPass(model, facts), ForwardPass(model, facts)
    for kind, (_, module) in zip(kinds, model.named_modules(), strict=True):
        assert isinstance(module, kind) and type(module).__name__ == kind.__name__
    purposes = [
        purpose for _, module in model.named_modules() for purpose in getattr(module, "_forward_purposes", ())
    ]
    assert purposes.count("trunk") == 1, "A second ForwardPass changed the model again"
    namespace: Any = qwen3_next
    attention = attention_over(base.scaled_dot_product_attention)
    assert namespace.scaled_dot_product_attention is attention is not base.scaled_dot_product_attention


def test_a_way_that_does_not_fit_is_an_error_and_not_wrong_text() -> None:
    model = build("llama")
    wrong = PassFacts(caches=(CacheSplit(PassSplit.ATTENTION),) * 4, hidden_size=1)
    forward = ForwardPass(model, wrong)
    original = type(model.layers[0].self_attn).__call__

    class Copying(type(model.layers[0].self_attn)):  # type: ignore[misc]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            class Doubling:
                offset = cache.offset

                def update_and_fetch(self, keys: Any, values: Any) -> Any:
                    keys, values = cache.update_and_fetch(keys, values)
                    return keys * 1.0, values

            return original(self, x, mask, Doubling())

    model.layers[1].self_attn.__class__ = Copying
    rows = [Row(make_prompt_cache(model)) for _ in range(2)]
    for count in (4, 1):
        with pytest.raises(NotSplittable):
            forward.run(mx.array(prompt_of(2 * count, 1)), [Share(row, count) for row in rows])


def test_tokens_taken_back_are_fewer_than_were_fed_and_asked_for() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    row = Row(make_prompt_cache(model))
    forward.run(mx.array([5, 6, 7]), [Share(row, 3)])
    with pytest.raises(AssertionError, match="may be taken back"):
        row.take_back(1)
    forward.run(mx.array([8, 9]), [Share(row, 2, may_be_taken_back=True)])
    with pytest.raises(AssertionError, match="cannot be taken back"):
        row.take_back(2)


def test_a_state_goes_back_to_where_the_pass_began() -> None:
    model = build("qwen3_next")
    forward = ForwardPass(model, examine(model))
    row = Row(make_prompt_cache(model))
    mx.eval(forward.run(mx.array(prompt_of(20, 1)), [Share(row, 20)]).arrays)
    mx.eval(forward.run(mx.array([5, 6, 7, 8]), [Share(row, 4, may_be_taken_back=True)]).arrays)
    assert row.take_back(3) == 1, "The one right token is fed again"
    assert row.token_count == 20
