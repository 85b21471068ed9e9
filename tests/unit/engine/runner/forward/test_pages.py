"""Rows whose KV lies in pages draw what they draw by themselves, with sliding windows, guesses and chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PagedAttention
from icehouse_server.engine.kv.page_groups import groups_of
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv.paged_cache import Paging
from icehouse_server.engine.kv.pool import PagePool, PassClock
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import Company, Guest, alone, examined, guests_of, prompt_of

PAGE_TOKEN_COUNT = 16
WITHOUT_PAGES = frozenset({"deepseek_v3", "mamba2", "llama4", "falcon_h1"})
"""Keys and values of different sizes, no KV at all, chunks of the context, KV in a list with a state."""


BACKENDS = (GatherAttention, *((CpuAttention,) if find_backend() is Backend.CPU else ()))
PADDED = ("llama", "gpt_oss", "qwen3")
LENGTHS = (37, 12, 205, 25, 37, 1)


def paging_of(
    model: Any,
    forward: ForwardPass,
    clock: PassClock,
    *,
    make_attention: Callable[[], PagedAttention] = GatherAttention,
    is_padded: bool = False,
) -> Paging:
    caches = make_prompt_cache(model)
    model(mx.array([[5, 6, 7]]), cache=caches)
    facts = groups_of(caches, attending=forward.facts.attending_indices, page_token_count=PAGE_TOKEN_COUNT)
    groups = [
        PageGroup(
            PagePool(each.shape, passes=clock),
            make_attention(),
            each.layers,
            each.window,
            is_padded,
        )
        for each in facts
    ]
    return Paging(tuple(groups))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_those_of_the_row_alone(architecture: str, backend: type[PagedAttention]) -> None:
    """With guesses and without; some come and go, and come back."""
    model, facts = examined(architecture)
    for seed, is_restless in enumerate((False, True)):
        forward = ForwardPass(model, dataclasses.replace(facts, layer_count=0))
        is_padded = is_restless and architecture in PADDED
        paging = paging_of(model, forward, PassClock(), make_attention=backend, is_padded=is_padded)
        assert bool(paging.groups) is (architecture not in WITHOUT_PAGES)
        if not paging.groups:
            return
        forward.page(paging)

        def make(paging: Paging = paging) -> list[Any]:
            return paging.caches(make_prompt_cache(model))

        guests = guests_of(architecture, LENGTHS, make)
        Company(forward, seed=seed, guesses=is_restless, make_caches=make if is_restless else None).run(
            guests
        )
        assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
        assert max(guest.farthest for guest in guests) < 2e-3
        del guests
        for group in paging.groups:
            assert group.pool.free_bytes == group.pool.page_count * group.pool.shape.page_bytes, (
                "pages are lost"
            )


def test_a_page_is_handed_out_again_only_when_the_pass_that_may_read_it_has_ended() -> None:
    clock = PassClock()
    model = build("llama")
    paging = paging_of(model, ForwardPass(model, examine(model)), clock)
    assert paging.groups
    pool = paging.groups[0].pool
    number = clock.dispatch()
    [page] = pool.take(1)
    freed = page.number
    del page
    others = pool.take(pool.page_count - 1)
    assert freed not in {other.number for other in others}
    clock.end(number)
    assert [other.number for other in pool.take(1)] == [freed]


def test_a_full_pool_waits_for_pages_of_earlier_passes_before_it_grows() -> None:
    clock = PassClock()
    model = build("llama")
    paging = paging_of(model, ForwardPass(model, examine(model)), clock)
    assert paging.groups
    pool = paging.groups[0].pool
    before = pool.page_count
    clock.dispatch()
    held = pool.take(before)
    del held[:2]
    pool.take(0)
    clock.dispatch()
    held += pool.take(2)
    assert pool.page_count == before
    held += pool.take(1)
    assert pool.page_count > before


def test_a_window_lets_go_of_pages_that_it_has_left_behind() -> None:
    model = build("gemma3_text")
    forward = ForwardPass(model, dataclasses.replace(examine(model), layer_count=0))
    paging = paging_of(model, forward, PassClock())
    forward.page(paging)
    assert paging.groups
    row = Row(paging.caches(make_prompt_cache(model)))
    guest = Guest(prompt_of(400, 1), *alone(model, prompt_of(400, 1), 4), row, prompt_of(400, 1))
    Company(forward, seed=1, guesses=False).run([guest])
    held = {run.group.window: len(run.pages) - run.numbers.count(-1) for run in row.table.runs}
    window = max(each for each in held if each is not None)
    assert held[None] == -(-row.token_count // PAGE_TOKEN_COUNT)
    # The last chunk's pages stay until the next pass; a window's tokens touch one page more than they fill.
    assert held[window] * PAGE_TOKEN_COUNT <= window + 64 + 3 * PAGE_TOKEN_COUNT
