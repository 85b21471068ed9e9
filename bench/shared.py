"""`make bench CASE=shared`: the first token of a prompt that only the object store has, as a ratio to cold.

Two servers of one model with a directory each, and one store: an S3 server of its own on loopback (rclone),
or with `--folder` a folder. Each round has a prompt of its own, which the first server computes and stores.
The second one is asked for it, and asked for another prompt that nobody has, so that it is compared with
itself. The model has random weights (bench.random_model).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.cache_ttft import OUTPUT_TOKEN_COUNT, connected
from bench.grpc_clients import READ_WRITE, Client, text_request
from bench.prompts import text_of_tokens
from bench.random_model import RandomModel, make_random_model
from bench.replies import Reply
from bench.report import (
    OUT,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import ServerProcess
from tests.fixtures.storage.s3_server import S3Server

PROMPT_TOKEN_COUNT = 1040
"""Four full blocks and a short question; only full blocks are shared."""
_BLOCK_TOKEN_COUNT = 256
_STORE_LIMIT_S = 60.0
_POLL_S = 0.05
_COLD_SEED = 1000


@dataclasses.dataclass(slots=True)
class Round:
    """Times of one prompt, in seconds, and how much of it the second server reused."""

    cold_s: float = 0.0
    """On the second server, for a prompt that nobody has."""
    shared_s: float = 0.0
    ram_s: float = 0.0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    replies_are_equal: bool = False


def main() -> None:
    """Measure, print the table, write bench/out/shared.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=shared", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--folder", action="store_true", help="share a folder, not an S3 server")
    parser.add_argument("--small", action="store_true", help="a model of a twentieth of the work")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    arguments = parser.parse_args()
    round_count = arguments.rounds or (1 if arguments.quick else 5)
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        which = RandomModel.SMALL if arguments.small else RandomModel.LARGE
        model_path = make_random_model(Path(scratch), which=which)
        rounds = asyncio.run(_measure(Path(scratch), model_path, round_count, has_folder=arguments.folder))
    _report(rounds, "folder" if arguments.folder else "S3 server")


@contextlib.contextmanager
def _store(scratch: Path, *, has_folder: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a store's URL and the environment that its users need."""
    if has_folder:
        folder = scratch / "store"
        folder.mkdir()
        yield f"file://{folder}", {}
    else:
        with S3Server(scratch / "store") as server:
            yield server.url, server.environment


async def _measure(scratch: Path, model_path: Path, round_count: int, *, has_folder: bool) -> list[Round]:
    rounds: list[Round] = []
    with _store(scratch, has_folder=has_folder) as (url, environment), contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                ServerProcess(
                    model=str(model_path),
                    cache_directory=scratch / name,
                    log_file=OUT / f"shared-{name}.log",
                    flags=("--shared-url", url, "--shared-lookup-timeout-ms", "2000"),
                    environment=environment,
                )
            )
            for name in ("first", "second")
        )
        async with connected(first.address) as one, connected(second.address) as two:
            # The first round only warms up both servers.
            for seed in range(round_count + 1):
                rounds.append(await _round(one, two, seed))
                console.print(f"prompt {seed} of {round_count}")
    return rounds[1:]


async def _round(one: Client, two: Client, seed: int) -> Round:
    text = await text_of_tokens(one, PROMPT_TOKEN_COUNT, seed=seed)
    unknown = await text_of_tokens(one, PROMPT_TOKEN_COUNT, seed=_COLD_SEED + seed)
    stored_count = (await one.stats()).cache.shared.stored_block_total
    computed, _, _ = await _ask(one, text)
    found = Round()
    cold, found.prompt_tokens, _ = await _ask(two, unknown)
    await _until_stored(one, stored_count + found.prompt_tokens // _BLOCK_TOKEN_COUNT)
    shared, _, found.shared_tokens = await _ask(two, text)
    again, _, _ = await _ask(two, text)
    found.cold_s, found.shared_s, found.ram_s = cold.ttft_s, shared.ttft_s, again.ttft_s
    found.replies_are_equal = computed.token_ids == shared.token_ids == again.token_ids
    return found


async def _ask(client: Client, text: str) -> tuple[Reply, int, int]:
    request = text_request(text, max_output_tokens=OUTPUT_TOKEN_COUNT, cache=READ_WRITE)
    reply, started, finished = await client.stream(request)
    return reply, started.prompt_tokens, finished.usage.ssd_tokens


async def _until_stored(client: Client, block_count: int) -> None:
    """Wait until so many blocks are in the store: writing them has the lowest priority."""
    async with asyncio.timeout(_STORE_LIMIT_S):
        while (await client.stats()).cache.shared.stored_block_total < block_count:
            await asyncio.sleep(_POLL_S)


def _report(rounds: list[Round], what: str) -> None:
    found = {
        "shared / cold": ratios([r.shared_s for r in rounds], [r.cold_s for r in rounds]),
        "RAM / cold": ratios([r.ram_s for r in rounds], [r.cold_s for r in rounds]),
    }
    seconds = {
        "cold": spread_of(r.cold_s for r in rounds),
        "from the object store": spread_of(r.shared_s for r in rounds),
        "RAM": spread_of(r.ram_s for r in rounds),
    }
    rows = [(name, spread.text()) for name, spread in (*found.items(), *seconds.items())]
    show_table(f"First token on a second server ({what})", ("compared", "median (min to max)"), rows)
    tokens = {(r.shared_tokens, r.prompt_tokens) for r in rounds}
    console.print(f"tokens from the store of those of the prompt: {sorted(tokens)}")
    console.print(f"the same replies in all rounds: {all(r.replies_are_equal for r in rounds)}")
    verdicts = [Verdict("first token, object store / cold", found["shared / cold"], 0.15, False)]
    show_verdicts(verdicts)
    content = {"setting": setting(), "store": what, "ratios": found, "seconds": seconds}
    console.print(str(write_json("shared", {**content, "targets": verdicts, "rounds": rounds})))


if __name__ == "__main__":
    main()
