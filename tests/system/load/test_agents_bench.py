"""The agents' bench against a real server: a small trace has the hits that the simulation says."""

from __future__ import annotations

from pathlib import Path

from bench.agents.live import Sending, replay_live
from bench.agents.trace import StreamIndex, Trace
from tests.fixtures.agent_traces import BLOCK, request
from tests.fixtures.models.folder import tiny_model_dir


async def test_a_real_server_has_the_hits_that_the_simulation_says(tmp_path: Path) -> None:
    index = StreamIndex()
    asked = [(0, [*range(10)]), (0, [*range(14)]), (1, [*range(6), 70, 71]), (0, [*range(20)])]
    requests = [
        request(index, ids, session=session, time_s=number / 10, is_last=number >= 2)
        for number, (session, ids) in enumerate(asked)
    ]
    late = request(index, [*range(30)], session=2, time_s=10_000.0)
    trace = Trace("given", BLOCK, (*requests, late))
    sending = Sending(
        time_scale=0.2, duration_s=60.0, block_token_count=BLOCK, ram_bytes=64 << 20, ssd_bytes=64 << 20
    )
    served = await replay_live(
        trace,
        sending,
        model=tiny_model_dir(tmp_path, "llama"),
        scratch=tmp_path,
        log_file=tmp_path / "server.log",
    )
    assert served.failures == () and served.request_count == 4, "the fifth is due later"
    assert served.prompt_token_count == (10 + 14 + 8 + 20) * BLOCK
    lru = served.simulated[0]
    # The simulation counts what a prompt has behind its last block too, of which no tokens are sent.
    known = lru.hit_rate * sum(each.token_count for each in requests)
    assert served.ram_token_count + served.ssd_token_count == round(known) == (10 + 6 + 14) * BLOCK
    assert 0 < served.ttft_p50_s <= served.ttft_p95_s
