"""`make bench CASE=fleet`: agents' sessions on one worker, on two behind cache-aware routing, on two in turn.

Token hit rate, time to first token, what the stores wrote; and what the gateway adds to a first token,
against direct calls of the same worker in turn with it. All workers share this machine, so that two are not
faster than one; what counts is how much of one worker's hits they keep. The model has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fleet.fleet import Fleet
from bench.fleet.overhead import Pair, measure_overhead
from bench.fleet.report import Findings, report
from bench.fleet.restore import StoreFacts, measure_restore
from bench.fleet.sessions import Session, Shape, make_sessions
from bench.fleet.workload import AWARE, ONE, TURNS, Arrangement, Played, Texts, directory_bytes, fitting, play
from bench.grpc_clients import Client
from bench.model_folder import model_path
from bench.report import OUT, console


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    scale: float
    """Of the shape's token counts."""
    session_count: int
    open_count: int
    """Sessions at once."""
    round_count: int
    pair_count: int
    block_token_count: int


FULL = Sizes(scale=1 / 12, session_count=16, open_count=8, round_count=3, pair_count=60, block_token_count=32)
QUICK = Sizes(scale=1 / 40, session_count=5, open_count=4, round_count=1, pair_count=10, block_token_count=16)


def main() -> None:
    """Measure, print the tables, write bench/out/fleet.json and .png."""
    parser = argparse.ArgumentParser(prog="make bench CASE=fleet", description=__doc__)
    parser.add_argument("--model", default="small", help="small, large, thin, or as for icehouse serve")
    parser.add_argument("--quick", action="store_true", help="few short sessions; a minute")
    parser.add_argument("--scale", type=float, help="of an agent's usual token counts")
    parser.add_argument("--sessions", type=int, help="sessions of each round")
    parser.add_argument("--open", type=int, help="sessions at once")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--pairs", type=int, help="calls through the gateway and past it")
    parser.add_argument("--block-tokens", type=int, help="tokens of a block")
    parser.add_argument("--ram", default="2GiB", help="RAM tier of each worker")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wanted = {
        "scale": arguments.scale,
        "session_count": arguments.sessions,
        "open_count": arguments.open,
        "round_count": arguments.rounds,
        "pair_count": arguments.pairs,
        "block_token_count": arguments.block_tokens,
    }
    sizes = dataclasses.replace(
        QUICK if arguments.quick else FULL, **{k: v for k, v in wanted.items() if v is not None}
    )
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        model = model_path(arguments.model, Path(name))
        bench = FleetBench(sizes, model=model, scratch=Path(name), ram=arguments.ram)
        report(asyncio.run(bench.run(arguments.seed)))
    console.print(f"{time.monotonic() - began:.0f} s in all")


class FleetBench:
    """All rounds; each arrangement of each round has workers and stores of its own."""

    def __init__(self, sizes: Sizes, *, model: Path, scratch: Path, ram: str) -> None:
        self._sizes = sizes
        self._model = model
        self._scratch = scratch
        self._flags = (
            *("--block-token-count", str(sizes.block_token_count), "--ram-bytes", ram),
            *("--flush-timeout-s", "120", "--no-restore-or-recompute"),
        )
        self._shape = Shape().scaled(sizes.scale)
        self._pairs: list[Pair] = []
        self._store: StoreFacts | None = None

    async def run(self, seed: int) -> Findings:
        """Measure every arrangement in every round, in changing order."""
        played: list[Played] = []
        for number in range(self._sizes.round_count):
            sessions = make_sessions(self._sizes.session_count, self._shape, seed=seed + number)
            order = (ONE, AWARE, TURNS) if number % 2 == 0 else (TURNS, AWARE, ONE)
            for arrangement in order:
                found = await self._arrangement(arrangement, sessions, number)
                played.append(found)
                console.print(
                    f"round {number + 1}: {found.arrangement}, {found.request_count} turns, "
                    f"{found.hit_rate:.1%} reused, {found.duration_s:.0f} s",
                    highlight=False,
                )
        assert self._store is not None, "one worker was never measured"
        return Findings(
            shape=self._shape,
            sizes=dataclasses.asdict(self._sizes),
            played=played,
            pairs=self._pairs,
            store=self._store,
        )

    async def _arrangement(
        self, arrangement: Arrangement, sessions: Sequence[Session], number: int
    ) -> Played:
        """Start workers and gateway, play the sessions, stop them and look at what they wrote."""
        folder = self._scratch / f"{arrangement.policy}-{arrangement.worker_count}-{number}"
        folder.mkdir()
        fleet = Fleet(
            model=self._model,
            folder=folder,
            worker_count=arrangement.worker_count,
            flags=self._flags,
            # A worker that is late on a busy machine is not gone.
            gateway_options=("--policy", arrangement.policy, "--health-failure-threshold", "10"),
        )
        async with fleet:
            client = Client(fleet.workers[0].address)
            texts = await Texts.of(client)
            limit = (await client.model()).context_tokens
            await client.close()
            found = await play(
                fleet,
                fitting(sessions, self._shape, context_token_limit=limit),
                self._shape,
                texts,
                arrangement=arrangement,
                open_count=self._sizes.open_count,
            )
            if arrangement is ONE:
                text = texts.text(self._shape.agent_token_count, key=0)
                said = [{"role": "system", "content": text}, {"role": "user", "content": "And now?"}]
                self._pairs += await measure_overhead(fleet, said, count=self._sizes.pair_count)
                self._store = self._store or await measure_restore(fleet, texts, self._shape)
        written = sum(directory_bytes(worker.directory) for worker in fleet.workers)
        return dataclasses.replace(found, written_bytes=written)


if __name__ == "__main__":
    main()
