"""Decode passes that are replayed draw what built ones draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.kv.pool import PassClock
from icehouse_server.engine.runner.forward import replay
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES
from tests.unit.engine.runner.forward.company import Company, examined, guests_of, prompt_of
from tests.unit.engine.runner.forward.functional_attention import FunctionalAttention
from tests.unit.engine.runner.forward.test_pages import WITHOUT_PAGES, paging_of

_LENGTHS = (37, 12, 1, 25, 37)
_PAGED = [name for name in ARCHITECTURES if name not in WITHOUT_PAGES]
_FAST = ("llama", "qwen3", "gemma3_text", "gpt_oss")
"""MLX compiles what it joins of a traced pass, with a C++ compiler where it computes on a CPU."""


def _forward(architecture: str) -> ForwardPass:
    model, facts = examined(architecture)
    forward = ForwardPass(model, dataclasses.replace(facts, layer_count=0))
    forward.page(paging_of(model, forward, PassClock(), make_attention=FunctionalAttention))
    return forward


def _rows(forward: ForwardPass, architecture: str, lengths: tuple[int, ...]) -> list[Row]:
    """Return rows that hold prompts of these lengths."""
    model, _ = examined(architecture)
    rows = [Row(forward.paging.caches(make_prompt_cache(model))) for _ in lengths]
    for seed, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        mx.eval(forward.run(mx.array(prompt_of(length, seed)), [Share(row, length)]).arrays)
    return rows


def _decode(forward: ForwardPass, rows: list[Row], count: int) -> Iterator[mx.array]:
    """Yield the logits of passes in which each row feeds the likeliest token of the one before."""
    ids = mx.array([7] * len(rows))
    for _ in range(count):
        output = forward.run(ids, [Share(row, 1, logit_count=1) for row in rows])
        assert output.logits is not None
        mx.eval(output.arrays)
        yield output.logits
        ids = mx.argmax(output.logits, axis=-1)


@pytest.mark.parametrize(
    "architecture", [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in _PAGED]
)
def test_tokens_are_those_of_the_row_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In company that comes and goes, with chunks between the replayed passes."""
    monkeypatch.setattr(replay, "TRACED_WHEN_SEEN", 1)
    model, _ = examined(architecture)
    forward = _forward(architecture)

    def make() -> list[Any]:
        return forward.paging.caches(make_prompt_cache(model))

    guests = guests_of(architecture, _LENGTHS, make)
    Company(forward, seed=3, guesses=False, make_caches=make).run(guests)
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    assert max(guest.farthest for guest in guests) < 2e-3
    is_all_attention = forward.facts.modes == (PassSplit.ATTENTION,)
    assert forward.replays.is_usable is is_all_attention
    assert bool(forward.replays.replay_count) is is_all_attention


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss"])
def test_a_replayed_pass_gives_what_a_built_one_gives(architecture: str) -> None:
    """Over page borders, beyond a window, and with other rows than those that were traced."""
    forward, built = _forward(architecture), _forward(architecture)
    built.replays.is_usable = False
    for lengths in ((5, 60, 33), (17, 90, 2)):
        pairs = zip(
            _decode(forward, _rows(forward, architecture, lengths), 40),
            _decode(built, _rows(built, architecture, lengths), 40),
            strict=True,
        )
        for got, wanted in pairs:
            assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-4).item()
    assert forward.replays.is_usable
    assert forward.replays.replay_count > 60


def test_a_model_that_looks_at_numbers_while_it_is_built_is_never_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, built = _forward("llama"), _forward("llama")
    built.replays.is_usable = False
    norm = mx.fast.rms_norm

    def looking(array: mx.array, *rest: Any) -> mx.array:
        float(array.sum().item())
        return norm(array, *rest)

    rows = _rows(forward, "llama", (5, 9))
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", looking)
        got = list(_decode(forward, rows, 5))
    wanted = list(_decode(built, _rows(built, "llama", (5, 9)), 5))
    assert all(mx.allclose(*pair, rtol=1e-4, atol=1e-4).item() for pair in zip(got, wanted, strict=True))
    assert not forward.replays.is_usable
    assert not forward.replays.replay_count
    assert "replay_unused" in caplog.text


def test_a_model_whose_graph_is_another_one_each_time_is_found_out_before_its_logits_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, built = _forward("llama"), _forward("llama")
    built.replays.is_usable = False
    norm, calls = mx.fast.rms_norm, iter(range(1 << 20))

    def drifting(array: mx.array, *rest: Any) -> mx.array:
        return norm(array, *rest) * (1 + 0.001 * next(calls))

    rows = _rows(forward, "llama", (5, 9))
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", drifting)
        list(_decode(forward, rows, 6))
    assert not forward.replays.is_usable
    assert "logits are off" in str([record.__dict__.get("detail") for record in caplog.records])


def test_a_pool_that_has_grown_is_traced_anew() -> None:
    forward, built = _forward("llama"), _forward("llama")
    built.replays.is_usable = False
    for lengths in ((20, 30), (700, 900)):
        pairs = zip(
            _decode(forward, _rows(forward, "llama", lengths), 8),
            _decode(built, _rows(built, "llama", lengths), 8),
            strict=True,
        )
        assert all(mx.allclose(*pair, rtol=1e-4, atol=1e-4).item() for pair in pairs)
    assert forward.replays.is_usable


def test_graphs_and_what_was_seen_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses how many rows decode chooses the keys."""
    monkeypatch.setattr(replay, "_TRACE_LIMIT", 2)
    monkeypatch.setattr(replay, "_SEEN_LIMIT", 2)
    forward = _forward("llama")
    rows = _rows(forward, "llama", (5, 9, 7, 8))
    for pass_count in (1, 3):
        for row_count in (1, 2, 3, 4):
            list(_decode(forward, rows[:row_count], pass_count))
            assert len(forward.replays._traced) <= 2
            assert len(forward.replays._seen) <= 2
    assert forward.replays.replay_count


def test_a_pool_that_is_given_back_is_held_by_no_trace() -> None:
    forward = _forward("qwen3")
    group = forward.paging.groups[0]
    rows = _rows(forward, "qwen3", (12, 20))
    list(_decode(forward, rows, 4))
    group.pool.take(group.pool.page_count)  # of nobody: a larger pool, all of it free
    list(_decode(forward, rows, 4))
    assert forward.replays.replay_count and forward.replays._pools[0] is group.pool.array
    rows.clear()
    group.attention.settle(group.pool)
    assert group.pool.shrink()
    assert not forward.replays._pools and not forward.replays._traced
    # What is traced then is right for the pages as they lie now.
    again, fresh = _forward("qwen3"), forward
    drawn = [
        [mx.argmax(logits, axis=-1).tolist() for logits in _decode(each, _rows(each, "qwen3", (9, 30)), 6)]
        for each in (fresh, again)
    ]
    assert drawn[0] == drawn[1]
