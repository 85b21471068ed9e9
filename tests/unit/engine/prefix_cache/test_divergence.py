"""Where a prompt parts from a cached one: the place, the tokens, and nothing of another tenant's."""

from __future__ import annotations

import pytest
from icehouse_server.domain.events import CacheReport, PromptDivergence, ReuseLimit
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.reuse_plan import plan, with_divergence
from icehouse_server.engine.prefix_cache.tiers.matching import LookupPrompt
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates

from tests.fixtures.known_blocks import HYBRID, KV_ONLY, ROOT, SIZE, WINDOWS, Shelf, root_of

LONG = list(range(100, 100 + 80 * SIZE))
OTHERS = root_of("others")


def report(shelf: Shelf, tokens: list[int], *, shared_root: BlockHash | None = None) -> CacheReport:
    prompt = LookupPrompt(tuple(tokens), ROOT, shared_root)
    return with_divergence(shelf.tree, prompt, plan(shelf.tree, prompt, Rates())).report


def changed(place: int, *, to: int = 7) -> list[int]:
    return [*LONG[:place], to, *LONG[place + 1 :]]


@pytest.mark.parametrize("facts", [KV_ONLY, WINDOWS, HYBRID], ids=["kv", "windows", "hybrid"])
@pytest.mark.parametrize("place", [161, 164, 200, len(LONG) - 1])
def test_the_first_token_that_differs_is_named(facts: CacheFacts, place: int) -> None:
    shelf = Shelf(facts)
    shelf.chain(LONG, ram=True)
    found = report(shelf, [*changed(place), 1])
    assert found.divergence == PromptDivergence(place, prompt_token_id=7, cached_token_id=LONG[place])


@pytest.mark.parametrize("place", [0, 1, 5, 50, 159])
def test_a_prompt_that_differs_early_is_known_by_what_comes_after(place: int) -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    assert report(shelf, changed(place)).divergence == PromptDivergence(place, 7, LONG[place])
    # A line that is longer or gone moves all that follows.
    longer = [*LONG[:place], 7, 8, 9, *LONG[place:]]
    assert report(shelf, longer).divergence == PromptDivergence(place, 7, LONG[place])
    shorter = [*LONG[:place], *LONG[place + 3 :]]
    assert report(shelf, shorter).divergence == PromptDivergence(place, LONG[place + 3], LONG[place])


def test_a_prompt_with_less_than_half_in_common_is_another_one() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    half = len(LONG) // 2
    assert report(shelf, [*LONG[: half - 1], *range(1000, 1000 + half + 1)]).divergence is None
    assert report(shelf, [*LONG[:40], *range(1000, 1280)]).divergence is None
    assert report(shelf, [*range(1000, 1200), *LONG[200:300]]).divergence is None


def test_a_prompt_that_goes_on_from_a_cached_one_does_not_part_from_it() -> None:
    shelf = Shelf()
    shelf.chain(LONG[:-2], ram=True)
    assert report(shelf, [*LONG[:-2], 1, 2, 3]).divergence is None
    assert report(shelf, LONG[:-2]).divergence is None
    assert report(shelf, LONG[:200]).divergence is None
    assert report(Shelf(), LONG).divergence is None


def test_of_several_the_one_that_goes_along_farthest_counts() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    shelf.chain(changed(250), ram=True)
    shelf.chain(changed(170), ram=True)
    asked = [*LONG[:252], 8, *LONG[253:]]
    assert report(shelf, asked).divergence == PromptDivergence(252, 8, LONG[252])


def test_the_latest_of_equals_counts() -> None:
    shelf = Shelf()
    shelf.chain(changed(201, to=5), ram=True)
    shelf.chain(changed(201, to=6), ram=True)
    assert report(shelf, changed(201)).divergence == PromptDivergence(201, 7, 6)


def test_blocks_whose_tokens_nobody_has_read_tell_nothing() -> None:
    shelf = Shelf()
    for node in shelf.chain(LONG, ssd=True):
        node.token_ids = None
    assert report(shelf, changed(201)).divergence is None


def test_another_tenants_prompts_are_not_looked_at() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True, root=OTHERS)
    assert report(shelf, changed(201)).divergence is None
    shared = report(shelf, changed(201), shared_root=OTHERS)
    # It may start from them, and that is all that it learns.
    assert (shared.cached_token_count, shared.limit, shared.divergence) == (201, ReuseLimit.DIVERGED, None)
    early = report(shelf, changed(1), shared_root=OTHERS)
    assert early.divergence is None


def test_what_is_its_own_behind_a_shared_beginning_is_told() -> None:
    shelf = Shelf()
    beginning = shelf.chain(LONG[:200], ram=True, root=OTHERS)
    names = shelf.tree.chain_names(ROOT, tuple(LONG[:200]))
    assert beginning[-1].hash not in names
    shelf.block(names[-1], 200, LONG[200:204], ram=True, ssd=False)
    found = report(shelf, changed(202), shared_root=OTHERS)
    assert found.divergence == PromptDivergence(202, 7, LONG[202])


def test_nothing_is_looked_for_unless_asked() -> None:
    shelf = Shelf()
    shelf.chain(LONG, ram=True)
    found = plan(shelf.tree, LookupPrompt(tuple(changed(201)), ROOT), Rates())
    assert found.report.limit is ReuseLimit.DIVERGED and found.report.divergence is None
