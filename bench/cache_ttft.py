"""TTFT of one long prompt cold, from RAM, and from SSD after a restart, beside mlx-lm's own server.

Each round has its own prompt. Both servers are loaded and compute in turn; then both are restarted, and
every prompt is sent once more. Block files may still be in the page cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.grpc_clients import READ_WRITE, Client, text_request
from bench.mlx_lm_server import MlxLmServer
from bench.prompts import text_of_tokens
from bench.report import Spread, console, ratios, spread_of
from bench.server_process import ServerProcess

OUTPUT_TOKEN_COUNT = 8


@dataclasses.dataclass(slots=True)
class PromptTimes:
    """Times of one prompt, in seconds; `*_tokens` are the tokens reused according to the server."""

    text: str
    prompt_tokens: int = 0
    cold_s: float = 0.0
    ram_s: float = 0.0
    ssd_s: float = 0.0
    ram_behind_s: float = 0.0
    """From RAM right after that, so that both are measured in the same conditions."""
    ram_tokens: int = 0
    ssd_tokens: int = 0
    peer_cold_s: float = 0.0
    peer_warm_s: float = 0.0
    peer_restarted_s: float = 0.0
    replies: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    @property
    def replies_are_equal(self) -> bool:
        """Whether cold, RAM and SSD gave the same tokens."""
        return len(set(self.replies)) == 1


async def measure_ttft(
    *, model_path: Path, scratch: Path, log_file: Path, round_count: int, token_count: int
) -> list[PromptTimes]:
    """Return one entry a round; the warm-up prompts are not among them."""
    server = ServerProcess(model=str(model_path), cache_directory=scratch / "ttft", log_file=log_file)
    peer = MlxLmServer(model_path=model_path, log_file=log_file)
    prompts: list[PromptTimes] = []
    with server, peer:
        async with connected(server.address) as client:
            # The first round only warms up both servers.
            for seed in range(round_count + 1):
                text = await text_of_tokens(client, token_count, seed=seed)
                prompts.append(await _first_session(client, peer, PromptTimes(text)))
                console.print(f"TTFT, prompt {seed} of {round_count}: cold and from RAM")
    with server, peer:
        async with connected(server.address) as client:
            for prompt in prompts:
                await _second_session(client, peer, prompt)
    console.print("TTFT, all prompts again after the restart")
    return prompts[1:]


async def _first_session(client: Client, peer: MlxLmServer, prompt: PromptTimes) -> PromptTimes:
    prompt.cold_s, _, _ = await _ask(client, prompt)
    prompt.ram_s, prompt.ram_tokens, _ = await _ask(client, prompt)
    prompt.peer_cold_s = peer.ttft_s(prompt.text, max_output_tokens=OUTPUT_TOKEN_COUNT)
    prompt.peer_warm_s = peer.ttft_s(prompt.text, max_output_tokens=OUTPUT_TOKEN_COUNT)
    return prompt


async def _second_session(client: Client, peer: MlxLmServer, prompt: PromptTimes) -> None:
    prompt.ssd_s, _, prompt.ssd_tokens = await _ask(client, prompt)
    prompt.ram_behind_s, _, _ = await _ask(client, prompt)
    prompt.peer_restarted_s = peer.ttft_s(prompt.text, max_output_tokens=OUTPUT_TOKEN_COUNT)


async def _ask(client: Client, prompt: PromptTimes) -> tuple[float, int, int]:
    request = text_request(prompt.text, max_output_tokens=OUTPUT_TOKEN_COUNT, cache=READ_WRITE)
    reply, started, finished = await client.stream(request)
    prompt.prompt_tokens = started.prompt_tokens
    prompt.replies.append(reply.token_ids)
    return reply.ttft_s, finished.usage.ram_tokens, finished.usage.ssd_tokens


def ttft_ratios(prompts: Sequence[PromptTimes]) -> dict[str, Spread]:
    """Return the ratios taken prompt by prompt, by what they compare."""

    def of(name: str) -> list[float | None]:
        return [getattr(prompt, name) for prompt in prompts]

    return {
        "RAM hit / cold": ratios(of("ram_s"), of("cold_s")),
        "SSD hit after restart / cold": ratios(of("ssd_s"), of("cold_s")),
        "SSD hit / RAM hit behind it": ratios(of("ssd_s"), of("ram_behind_s")),
        "mlx-lm warm / mlx-lm cold": ratios(of("peer_warm_s"), of("peer_cold_s")),
        "mlx-lm after restart / mlx-lm cold": ratios(of("peer_restarted_s"), of("peer_cold_s")),
        "icehouse cold / mlx-lm cold": ratios(of("cold_s"), of("peer_cold_s")),
        "icehouse RAM hit / mlx-lm warm": ratios(of("ram_s"), of("peer_warm_s")),
        "icehouse after restart / mlx-lm after restart": ratios(of("ssd_s"), of("peer_restarted_s")),
    }


def ttft_seconds(prompts: Sequence[PromptTimes]) -> dict[str, Spread]:
    """Return the seconds, for the plot and for orientation."""
    return {
        "icehouse cold": spread_of(prompt.cold_s for prompt in prompts),
        "icehouse RAM": spread_of(prompt.ram_s for prompt in prompts),
        "icehouse SSD, restarted": spread_of(prompt.ssd_s for prompt in prompts),
        "mlx-lm cold": spread_of(prompt.peer_cold_s for prompt in prompts),
        "mlx-lm warm": spread_of(prompt.peer_warm_s for prompt in prompts),
        "mlx-lm restarted": spread_of(prompt.peer_restarted_s for prompt in prompts),
    }


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """Yield a connected client."""
    client = Client(address)
    await client.ready()
    try:
        yield client
    finally:
        await client.close()
