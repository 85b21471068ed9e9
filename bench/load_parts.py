"""Parts of the load bench: decode alone, and first tokens of short prompts beside a long one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from bench.grpc_clients import NO_CACHE, Client, text_request
from bench.load_arrivals import page
from bench.load_gaps import gaps_of
from bench.load_run import percentiles
from bench.replies import Reply

ALONE_CLIENTS = 8
_ALONE_TOKENS = 96
_SHORT_TOKENS = 4
_PAGE_STEP = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ShortBesideLong:
    """TTFT of short prompts, in seconds: p95 idle, and p95 while a long prompt is being computed."""

    long_token_count: int
    long_ttft_s: float
    idle_p95_s: float
    busy_p95_s: float
    busy_count: int


async def decode_alone_p50_s(clients: Sequence[Client]) -> float:
    """Return the median inter-token time of a few replies that decode together, nothing else running."""
    requests = [
        text_request(page(1, seed=900 + i), max_output_tokens=_ALONE_TOKENS) for i in range(ALONE_CLIENTS)
    ]
    seen = await asyncio.gather(
        *(clients[i % len(clients)].stream(request) for i, request in enumerate(requests))
    )
    # The first tokens arrive while other prompts are still being computed.
    settled = [Reply(r.start_time_s, r.token_times_s[len(r.token_times_s) // 3 :], ()) for r, _, _ in seen]
    return percentiles([gap.duration_s for reply in settled for gap in gaps_of(reply)]).p50_s


async def short_beside_long(client: Client, other: Client, *, long_token_count: int) -> ShortBesideLong:
    """Ask short prompts one after another, first alone, then while `other` waits for a long one."""
    idle = [await _short_ttft_s(client, seed=i) for i in range(20)]
    text = await _long_text(other, long_token_count)
    request = text_request(text, max_output_tokens=1, cache=NO_CACHE)
    waiting = asyncio.create_task(other.stream(request))
    busy: list[float] = []
    while not waiting.done():
        # A short prompt that outlasts the long one counts too: it may have waited for all of it.
        busy.append(await _short_ttft_s(client, seed=10_000 + len(busy)))
    reply, started, _ = await waiting
    return ShortBesideLong(
        long_token_count=started.prompt_tokens,
        long_ttft_s=reply.ttft_s,
        idle_p95_s=percentiles(idle).p95_s,
        busy_p95_s=percentiles(busy).p95_s,
        busy_count=len(busy),
    )


async def _short_ttft_s(client: Client, *, seed: int) -> float:
    request = text_request(page(1, seed=seed), max_output_tokens=_SHORT_TOKENS, cache=NO_CACHE)
    return (await client.stream(request))[0].ttft_s


async def _long_text(client: Client, token_count: int) -> str:
    """Return a text of about so many tokens, estimated from the tokens of a page."""
    page_tokens = len(await client.tokenize(page(_PAGE_STEP, seed=7)))
    return page(max(1, _PAGE_STEP * token_count // page_tokens), seed=8)
