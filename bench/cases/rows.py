"""Rows that decode while something else is looked at, and are cancelled then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from bench.cases.testbed import REPLY_TIMEOUT_S
from bench.grpc_clients import Client, token_request

_POLL_S = 0.01


@contextlib.asynccontextmanager
async def decoding_rows(
    clients: Sequence[Client],
    prompts: Sequence[Sequence[int]],
    *,
    max_output_tokens: int,
    step_count: int,
    ignore_end_tokens: bool = False,
) -> AsyncIterator[list[list[float]]]:
    """Give the token times of each row, which grow, once every row has had more than `step_count` tokens.

    Cache off. With `ignore_end_tokens` a row goes on where its model, which may be a random one, would end
    it. Raises when a row ended by itself before the block did: then not all decoded meanwhile.
    """
    heard: list[list[float]] = [[] for _ in prompts]
    requests = [token_request(prompt, max_output_tokens=max_output_tokens) for prompt in prompts]
    for request in requests:
        request.sampling.ignore_end_tokens = ignore_end_tokens
    rows = [
        asyncio.create_task(client.stream(request, heard=times))
        for client, request, times in zip(clients, requests, heard, strict=True)
    ]
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while min(map(len, heard)) <= step_count and not any(row.done() for row in rows):
                await asyncio.sleep(_POLL_S)
            if not any(row.done() for row in rows):
                yield heard
        ended_count = sum(row.done() for row in rows)
    finally:
        for row in rows:
            row.cancel()
        outcomes = await asyncio.gather(*rows, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    if ended_count:
        raise RuntimeError(
            f"{ended_count} rows ended too early; give them more than {max_output_tokens} tokens"
        )
