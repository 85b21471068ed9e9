"""Contract with mlx-lm: which way each of its architectures takes; a way that changes fails here."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.probe import examine_steps
from icehouse_server.engine.runner.forward.row import Row
from icehouse_server.engine.runner.forward.splits import CacheSplit, PassFacts
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward import splits_table
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of
from tests.unit.engine.runner.forward.small_models import architectures

TABLE = splits_table.read()


def test_the_table_has_every_architecture() -> None:
    assert sorted(TABLE) == architectures()


@pytest.mark.parametrize("architecture", sorted(TABLE))
def test_an_architecture_keeps_its_way(architecture: str) -> None:
    expected = TABLE[architecture]
    if "not_built" in expected and mx.metal.is_available():
        pytest.skip(f"the table was made where it cannot run: {expected['not_built']}")
    found = splits_table.entry_of(architecture)
    assert {**found, "reason": ""} == {**expected, "reason": ""}, (
        "this mlx-lm is served otherwise; if that is right, "
        "run python -m tests.unit.engine.runner.forward.splits_table"
    )


def test_what_fits_no_way_runs_alone_and_says_why() -> None:
    model = build("llama")
    facts = PassFacts(caches=(), hidden_size=1, can_take_back=True)
    assert facts.modes == (PassSplit.ALONE,)
    guests = []
    for seed, length in enumerate((5, 30, 17)):
        prompt = prompt_of(length, seed)
        tokens, logits = alone(model, prompt, 8)
        guests.append(Guest(prompt, tokens, logits, Row(make_prompt_cache(model)), list(prompt)))
    Company(ForwardPass(model, facts), seed=1, guesses=True).run(guests)
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    assert TABLE["afm7"]["ways"] == "alone" and TABLE["afm7"]["reason"]


def test_a_wrong_way_is_found_out() -> None:
    """Attention by row cannot serve latent attention; the trial says so and takes the module."""
    facts = examine(build("deepseek_v3"))
    assert facts.modes == (PassSplit.MODULE,)
    assert facts.reason
    assert all(cache == CacheSplit(PassSplit.MODULE) for cache in facts.caches)


def test_others_have_their_turn_between_two_passes_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build("llama"), 0
    kind = type(model.layers[0])
    really = kind.__call__

    def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        return really(*arguments, **settings)

    monkeypatch.setattr(kind, "__call__", counted)
    at_once = examine(model)
    monkeypatch.undo()
    monkeypatch.setattr(kind, "__call__", counted)
    steps, most = examine_steps(build("llama")), 0  # a trial gives the layers another class
    while True:
        calls = 0
        try:
            next(steps)
        except StopIteration as end:
            assert end.value == at_once
            break
        most = max(most, calls)
    # A chunk that is begun twice goes through half of the layers each time.
    assert 0 < most <= 2 * len(model.layers)


def test_state_layers_stack_and_the_rest_is_split_at_attention() -> None:
    modes: list[Any] = [cache.mode for cache in examine(build("qwen3_next")).caches]
    assert modes == [PassSplit.MODULE, PassSplit.ATTENTION, PassSplit.MODULE, PassSplit.ATTENTION]
    assert all(cache.is_stacked for cache in examine(build("mamba2")).caches)
