"""Fuzz a server of this tree: mutated requests over every RPC, each of which must get a documented status.

Usage: python -m tests.system.fuzz [--seed 1] [--requests 20000] [--first 0] [--folder build/fuzz]
       python -m tests.system.fuzz --images [smolvlm] [--seed 1] ...
       python -m tests.system.fuzz --replay FILE [--images smolvlm]

With `--images` the model is one that sees, of the family named, and every request is a conversation with
images: whole, cut off, damaged, animated, of another type than was said, or larger than any may be.

Request `i` of a seed is always the same, so `--first i --requests 1` sends it again. Each chunk is a line of
`report-SEED.jsonl` in the folder; chunks that are there already are not played again. A request that fails
is made smaller and written beside the report, with the server's log: put into `tests/system/fuzz/found/` it
is a regression test.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.system.fuzz.caller import Caller, calling
from tests.system.fuzz.campaign import Campaign, Chunk
from tests.system.fuzz.requests import FuzzRequest
from tests.system.fuzz.server import Fuzzed, fuzzed, fuzzed_with_images
from tests.system.fuzz.shrink import shrunk

_CHUNK_COUNT = 20_000
_SHRUNK_COUNT = 3


def main() -> int:
    """Run what the arguments say; 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first request's number")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--replay", type=Path, help="send the request of this file, and no other")
    parser.add_argument(
        "--images", nargs="?", const="smolvlm", metavar="FAMILY", help="images to a model that sees"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="icehouse-fuzz-") as scratch,
        _server(Path(scratch), arguments.images) as server,
    ):
        if arguments.replay is not None:
            return asyncio.run(_replay(server, arguments.replay))
        return asyncio.run(_play(server, arguments))


def _server(folder: Path, family: str | None) -> contextlib.AbstractContextManager[Fuzzed]:
    return fuzzed(folder) if family is None else fuzzed_with_images(folder, family)


async def _replay(server: Fuzzed, file: Path) -> int:
    async with calling(server.process.address, server.tokens) as caller:
        outcome = await caller.send(FuzzRequest.load(file))
    print(outcome)
    return int(outcome.problem is not None)


async def _play(server: Fuzzed, arguments: argparse.Namespace) -> int:
    family = arguments.images
    report = arguments.folder / f"report-{f'{family}-' if family else ''}{arguments.seed}.jsonl"
    done = {line["first"]: line for line in _lines(report)}
    chunks: list[dict[str, Any]] = []
    async with calling(server.process.address, server.tokens) as caller:
        campaign = Campaign(server, caller, seed=arguments.seed, has_images=family is not None)
        before = await campaign.good_tokens()
        start_rss_bytes = server.rss_bytes()
        end = arguments.first + arguments.requests
        for first in range(arguments.first, end, _CHUNK_COUNT):
            count = min(_CHUNK_COUNT, end - first)
            if first in done and done[first]["count"] == count:
                chunks.append(done[first])
                continue
            chunk = await campaign.play(first, count)
            rate = count / chunk.duration_s
            facts = f"{rate:.0f}/s, {chunk.rss_bytes >> 20} MiB, slowest {chunk.slowest[0]:.1f} s"
            print(f"{first:>9} to {first + count}: {facts} ({chunk.slowest[1]})", flush=True)
            if chunk.failures:
                shutil.copy(server.log, arguments.folder / "server.log")
                await _tell(caller, chunk, arguments.folder)
                return 1
            with report.open("a", encoding="utf-8") as lines:
                lines.write(chunk.to_json() + "\n")
            chunks.append(json.loads(chunk.to_json()))
        after = await campaign.good_tokens()
    _print_table(chunks)
    print(f"memory: {start_rss_bytes >> 20} MiB at the start, {server.rss_bytes() >> 20} MiB at the end")
    print(f"a good request at the start and at the end: {before} and {after}")
    return int(before != after)


async def _tell(caller: Caller, chunk: Chunk, folder: Path) -> None:
    """Print what failed and write each request: made small where the server still serves, else as it was."""
    for number, failure in enumerate(chunk.failures):
        print(f"{failure.name}: {failure.problem}", file=sys.stderr)
        if not failure.request.path:
            continue

        async def fails(request: FuzzRequest, kind: str = failure.problem[:30]) -> bool:
            problem = (await caller.send(request)).problem
            return problem is not None and problem[:30] == kind

        request = failure.request
        if number < _SHRUNK_COUNT and not await _is_gone(caller):
            request = await shrunk(request, fails)
        file = folder / f"{failure.name.replace(' ', '-')}.json"
        file.write_text(request.to_json(), encoding="utf-8")
        print(f"  written to {file}", file=sys.stderr)


async def _is_gone(caller: Caller) -> bool:
    health = FuzzRequest("/grpc.health.v1.Health/Check", (b"",), "operator", timeout_s=10.0)
    return (await caller.send(health)).code != "OK"


def _lines(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def _print_table(chunks: list[dict[str, Any]]) -> None:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for chunk in chunks:
        for path, code, reason, count in chunk["rows"]:
            counts[path, code] += count
            reasons[reason] += count
    codes = sorted({code for _, code in counts})
    print("| RPC | requests | " + " | ".join(codes) + " |")
    print("|---|--:|" + "--:|" * len(codes))
    for path in sorted({path for path, _ in counts}):
        row = [counts[path, code] for code in codes]
        print(f"| `{path[1:]}` | {sum(row)} | " + " | ".join(str(count or "") for count in row) + " |")
    row = [sum(count for (_, code), count in counts.items() if code == wanted) for wanted in codes]
    print(f"| all | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    print("reasons: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common() if reason))
    duration_s = sum(chunk["duration_s"] for chunk in chunks)
    print(f"{sum(row)} requests in {duration_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
