"""`make bench CASE=growth`: when one worker is enough, and what more of them keep of its hits, by simulation.

No server runs. What one worker's work costs is given by flags; `make bench CASE=fleet` measures it and prints
them at its end. The rest follows from the seed, in half a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

from bench.fleet.sessions import Session, Shape, last_token_counts, make_sessions, tokens_of
from bench.fleet.simulated_worker import Costs
from bench.fleet.simulation import SPILL_COUNT, Outcome, Routing, simulate, start_times
from bench.report import console, show_table

_GIB = 1 << 30
_KIB = 1 << 10
_LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
_RAM_SHARES = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Of the KV of the sessions that are open at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is simulated: who asks, of which workers, from which seed."""

    shape: Shape
    costs: Costs
    session_count: int
    worker_count: int
    load: float
    spill_count: int
    seed: int

    def play(
        self, *, worker_count: int, load: float, routing: Routing, costs: Costs | None = None
    ) -> Outcome:
        """Simulate the share of the sessions that so many of the workers get."""
        sessions = self.sessions(worker_count)
        costs = costs or self.costs
        starts_s = start_times(
            sessions, self.shape, costs, worker_count=worker_count, load=load, seed=self.seed + 1
        )
        return simulate(
            sessions,
            starts_s,
            self.shape,
            costs,
            worker_count=worker_count,
            routing=routing,
            spill_count=self.spill_count,
        )

    def sessions(self, worker_count: int) -> list[Session]:
        """Return those that so many workers get."""
        count = max(1, self.session_count * worker_count // self.worker_count)
        return make_sessions(count, self.shape, seed=self.seed)


def main() -> None:
    """Simulate and print the tables."""
    question = question_of(sys.argv[1:])
    began = time.monotonic()
    _show_sessions(question)
    show_table("One worker, by its load", ("work if all hits are had", *COLUMNS), load_rows(question))
    show_table(
        "One worker, by its RAM tier, as a share of the open sessions' KV",
        ("RAM tier", *COLUMNS),
        ram_rows(question),
    )
    show_table(
        f"Workers and routing, each worker with {question.load:.0%} of work if all hits are had",
        ("workers", "sessions", "computed, of one's", *COLUMNS),
        routing_rows(question),
    )
    console.print(f"{time.monotonic() - began:.0f} s in all")


def question_of(flags: Sequence[str]) -> Question:
    """Return what the command's flags ask for."""
    parser = argparse.ArgumentParser(prog="make bench CASE=growth", description=__doc__)
    add, usual = parser.add_argument, Shape()
    add("--prefill", type=float, default=500, help="tokens/s that one worker computes of prompts")
    add("--decode", type=float, default=60, help="tokens/s that it draws, of all streams together")
    add("--restore", type=float, default=20_000, help="tokens/s that it takes from SSD")
    add("--kv-kib", type=float, default=45, help="KiB of KV per token")
    add("--block-tokens", type=int, default=256, help="tokens of a block")
    add("--ram-gib", type=float, default=8, help="GiB of a worker's RAM tier")
    add("--ssd-gib", type=float, default=100, help="GiB of a worker's SSD tier")
    add("--gateway-ms", type=float, default=5, help="ms that the gateway adds to a first token")
    add("--workers", type=int, default=64, help="most workers")
    add("--sessions", type=int, default=10_000, help="sessions of that many workers; fewer get their share")
    add("--agents", type=int, default=usual.agent_count, help="agents that the sessions are of")
    add("--agent-tokens", type=int, default=usual.agent_token_count, help="tokens of an agent's instructions")
    add("--turns", type=int, default=usual.turn_count, help="mean turns of a session")
    add("--input-tokens", type=int, default=usual.input_token_count, help="median tokens of a later turn")
    add("--output-tokens", type=int, default=usual.output_token_count, help="median tokens of an answer")
    add("--pause", type=float, default=usual.pause_s, help="mean seconds between an answer and the next turn")
    add("--load", type=float, default=0.6, help="share of a worker's time that is work if all hits are had")
    add("--balance", type=int, default=SPILL_COUNT, help="SMG's --balance-abs-threshold")
    add("--seed", type=int, default=1)
    return _question(parser.parse_args(flags))


def _question(arguments: argparse.Namespace) -> Question:
    shape = Shape(
        agent_count=arguments.agents,
        agent_token_count=arguments.agent_tokens,
        input_token_count=arguments.input_tokens,
        output_token_count=arguments.output_tokens,
        turn_count=arguments.turns,
        pause_s=arguments.pause,
    )
    costs = Costs(
        prefill_tokens_per_s=arguments.prefill,
        decode_tokens_per_s=arguments.decode,
        restore_tokens_per_s=arguments.restore,
        kv_bytes_per_token=round(arguments.kv_kib * _KIB),
        block_token_count=arguments.block_tokens,
        ram_bytes=round(arguments.ram_gib * _GIB),
        ssd_bytes=round(arguments.ssd_gib * _GIB),
        gateway_s=arguments.gateway_ms / 1000,
    )
    return Question(
        shape=shape,
        costs=costs,
        session_count=arguments.sessions,
        worker_count=arguments.workers,
        load=arguments.load,
        spill_count=arguments.balance,
        seed=arguments.seed,
    )


def load_rows(question: Question) -> list[tuple[str, ...]]:
    """Return one worker's cells at rising loads."""
    alone = [question.play(worker_count=1, load=load, routing=Routing.CACHE_AWARE) for load in _LOADS]
    return [(f"{load:.0%}", *_cells(outcome)) for load, outcome in zip(_LOADS, alone, strict=True)]


def _show_sessions(question: Question) -> None:
    sessions = question.sessions(question.worker_count)
    tokens = tokens_of(sessions, question.shape)
    lengths = last_token_counts(sessions, question.shape)
    median, mean = statistics.median(lengths), statistics.fmean(lengths)
    costs, count = question.costs, len(sessions)
    kv_gib = costs.kv_bytes_per_token / _GIB
    prefill_s = tokens.new_count / count / costs.prefill_tokens_per_s
    decode_s = tokens.output_count / count / costs.decode_tokens_per_s
    console.print(
        f"{len(sessions):,} sessions of {question.shape.agent_count} agents: {tokens.prompt_count / 1e9:.2f} "
        f"billion prompt tokens, {tokens.hit_rate:.1%} of them seen before; at their ends "
        f"{median:,.0f} tokens in the median, {mean:,.0f} in the mean: {median * kv_gib:.2f} and "
        f"{mean * kv_gib:.2f} GiB of KV. A session takes {prefill_s:.0f} s of prefill and {decode_s:.0f} s "
        "of decoding in the mean, if all hits are had",
        highlight=False,
    )


def ram_rows(question: Question) -> list[tuple[str, ...]]:
    """Return one worker's cells with more and less RAM than its open sessions take."""
    open_gib = _open_kv_bytes(question) / _GIB
    rows = []
    for share in _RAM_SHARES:
        costs = dataclasses.replace(question.costs, ram_bytes=round(share * open_gib * _GIB))
        outcome = question.play(worker_count=1, load=question.load, routing=Routing.CACHE_AWARE, costs=costs)
        rows.append((f"{share * open_gib:.2f} GiB, {share:.0%}", *_cells(outcome)))
    return rows


def _open_kv_bytes(question: Question) -> float:
    """Return the KV of the sessions that one worker has open at once, each at its end."""
    sessions = question.sessions(1)
    starts_s = start_times(
        sessions, question.shape, question.costs, worker_count=1, load=question.load, seed=question.seed + 1
    )
    costs, tokens = question.costs, tokens_of(sessions, question.shape)
    work_s = tokens.new_count / costs.prefill_tokens_per_s + tokens.output_count / costs.decode_tokens_per_s
    lasting_s = work_s + sum(turn.pause_s for session in sessions for turn in session.turns)
    open_count = lasting_s / max(starts_s[-1], 1e-9)
    token_count = statistics.fmean(last_token_counts(sessions, question.shape))
    return open_count * token_count * costs.kv_bytes_per_token


def routing_rows(question: Question) -> list[tuple[str, ...]]:
    """Return the cells of one worker, and of twice as many again and again, up to the most."""
    one = question.play(worker_count=1, load=question.load, routing=Routing.CACHE_AWARE)
    rows = [("1", f"{one.session_count:,}", "1.00", *_cells(one))]
    count = 2
    while count <= question.worker_count:
        for routing in Routing:
            outcome = question.play(worker_count=count, load=question.load, routing=routing)
            computed = (1 - outcome.hit_rate) / (1 - one.hit_rate)
            name = f"{count}, {routing.value}"
            rows.append((name, f"{outcome.session_count:,}", f"{computed:.2f}", *_cells(outcome)))
        count *= 2
    return rows


COLUMNS = ("hit rate", "of it SSD", "TTFT s p50 p95", "busy mean max", "GB written")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        f"{outcome.hit_rate:.1%}",
        f"{outcome.ssd_share:.0%}",
        f"{outcome.ttft_p50_s:.2f} {outcome.ttft_p95_s:.2f}",
        f"{outcome.busy_mean:.0%} {outcome.busy_max:.0%}",
        f"{outcome.written_bytes / 1e9:,.0f}",
    )


if __name__ == "__main__":
    main()
