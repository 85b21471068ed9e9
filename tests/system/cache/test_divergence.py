"""Where a prompt parted, told by a whole engine: of blocks in RAM, on SSD, and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Explain, Explanation
from icehouse_server.domain.events import PromptDivergence
from icehouse_server.domain.ids import CacheScope

from tests.system.cache.stepped_server import BLOCK, HYBRID, KV, WINDOWS, SteppedServer, prompt
from tests.system.cache.test_tenant_quotas import A, B

ASKED = prompt(20 * BLOCK)
PLACE = 15 * BLOCK + 1
OTHER = [*ASKED[:PLACE], ASKED[PLACE] % 7 + 1, *ASKED[PLACE + 1 :]]
PARTED = PromptDivergence(PLACE, prompt_token_id=OTHER[PLACE], cached_token_id=ASKED[PLACE])


def explained(served: SteppedServer, tokens: list[int]) -> PromptDivergence | None:
    answer = served.order(Explain(tuple(tokens), CacheScope(A)))
    assert isinstance(answer, Explanation)
    return answer.cache.divergence


@pytest.mark.parametrize("facts", [KV, WINDOWS, HYBRID])
def test_a_request_and_explain_tell_the_same(facts) -> None:
    assert OTHER[PLACE] != ASKED[PLACE]
    with SteppedServer(facts=facts) as served:
        served.ask("first", ASKED, tenant=A)
        assert explained(served, OTHER) == PARTED
        usage = served.ask("other", OTHER, tenant=A)
        assert usage.cache.divergence == PARTED and usage.cache.cached_token_count > 0
        assert served.ask("again", OTHER, tenant=A).cache.divergence is None
        assert served.ask("of b", [*OTHER[:-1], 1, 2], tenant=B).cache.divergence is None
        served.check()


def test_blocks_on_ssd_are_read_for_it_after_a_restart(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("first", ASKED, tenant=A)
    with SteppedServer(tmp_path) as served:
        assert explained(served, OTHER) == PARTED
        assert served.ask("other", OTHER, tenant=A).cache.divergence == PARTED
        served.check()
