"""What the agents' bench says: tables by rule and size, the files, the plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from bench.agents.live import Served
from bench.agents.rules import Rule
from bench.agents.simulation import Outcome
from bench.agents.trace import Trace
from bench.plots import save
from bench.report import Spread, console, ratios, setting, show_table, spread_of, write_json

EVERYTHING = 1.0
"""The share of a cache that lets go of nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """All outcomes of one run; each list has one entry a round, the first rule is today's."""

    trace: str
    kv_bytes_per_token: int
    blocks: Mapping[tuple[str, float], Sequence[Outcome]]
    """By rule and share of all different blocks."""
    checkpoints: Mapping[tuple[str, float], Sequence[Outcome]]

    def spread(self, rule: str, share: float, number: Callable[[Outcome], float]) -> Spread:
        """Return a number's spread over the rounds, for models whose KV can be cut."""
        return spread_of(number(each) for each in self.blocks[rule, share])


def describe(trace: Trace, *, block_count: int) -> str:
    """Return what a trace is in one line."""
    seen = 1 - block_count * trace.block_token_count / max(1, trace.prompt_token_count)
    return (
        f"{trace.name}: {len(trace.requests):,} requests in {trace.session_count:,} sessions over "
        f"{trace.requests[-1].time_s / 3600:.1f} h, {trace.prompt_token_count / 1e6:,.0f} million prompt "
        f"tokens, {seen:.1%} of them seen before; {block_count:,} different blocks of "
        f"{trace.block_token_count} tokens"
    )


def report(found: Findings) -> None:
    """Print the tables; write bench/out/agents.json and .png."""
    if found.blocks:
        _show_blocks(found)
    if found.checkpoints:
        _show_checkpoints(found)
    content = {
        "setting": setting(),
        "trace": found.trace,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "blocks": _plain(found.blocks),
        "checkpoints": _plain(found.checkpoints),
    }
    console.print(str(write_json("agents", content)))
    console.print(str(plot(found)))


def _show_blocks(found: Findings) -> None:
    shares = _shares(found.blocks)
    for share in shares:
        rules = [rule for rule, of in found.blocks if of == share]
        limit = found.blocks[rules[0], share][0].block_limit
        show_table(
            f"Models whose KV can be cut, a cache of {_size(share)}: {limit:,} blocks",
            ("rule", "token hit rate", "more than LRU (min to max)", "of it RAM", "GB written", "GB read"),
            [_block_row(found, rule, share) for rule in rules],
        )


def _block_row(found: Findings, rule: str, share: float) -> tuple[str, ...]:
    size, rounds, lru = (
        found.kv_bytes_per_token,
        found.blocks[rule, share],
        found.blocks[Rule.LRU.value, share],
    )
    gains = spread_of(each.hit_rate - base.hit_rate for each, base in zip(rounds, lru, strict=True))
    return (
        rule,
        found.spread(rule, share, lambda each: each.hit_rate).number(4),
        _text(gains),
        found.spread(rule, share, lambda each: each.ram_hit_rate).number(4),
        found.spread(rule, share, lambda each: each.written_token_count * size / 1e9).number(0),
        found.spread(rule, share, lambda each: each.read_token_count * size / 1e9).number(0),
    )


def _show_checkpoints(found: Findings) -> None:
    for share in _shares(found.checkpoints):
        rules = [rule for rule, of in found.checkpoints if of == share]
        show_table(
            f"Models that need checkpoints, a cache of {_size(share)}",
            (
                "rule",
                "token hit rate",
                "of all's hits (min to max)",
                "held a session",
                "shared",
                "GB written",
            ),
            [_checkpoint_row(found, rule, share, rules[0]) for rule in rules],
        )


def _checkpoint_row(found: Findings, rule: str, share: float, today: str) -> tuple[str, ...]:
    rounds, all_of = found.checkpoints[rule, share], found.checkpoints[today, share]
    size = found.kv_bytes_per_token
    kept = ratios([each.hit_rate for each in rounds], [each.hit_rate for each in all_of])
    return (
        rule,
        spread_of(each.hit_rate for each in rounds).number(4),
        _text(kept),
        spread_of(each.checkpoints_per_session for each in rounds).number(1),
        spread_of(each.shared_checkpoint_count for each in rounds).number(0),
        spread_of(each.written_token_count * size / 1e9 for each in rounds).number(0),
    )


def report_live(served: Served, *, trace: str) -> None:
    """Print what a server made of a trace beside the simulation; write bench/out/agents-server.json."""
    show_table(
        f"{trace} against a server: {served.request_count} requests in {served.duration_s:.0f} s",
        ("", "token hit rate", "of it RAM", "of it SSD", "MB written", "MB read", "TTFT ms p50", "p95"),
        [
            (
                "server",
                f"{served.hit_rate:.4f}",
                *(f"{count / max(1, served.prompt_token_count):.4f}" for count in _tiers(served)),
                f"{served.written_bytes / 1e6:.0f}",
                f"{served.read_bytes / 1e6:.0f}",
                f"{1000 * served.ttft_p50_s:.0f}",
                f"{1000 * served.ttft_p95_s:.0f}",
            ),
            *(_simulated_row(served, each) for each in served.simulated),
        ],
    )
    for failure in served.failures:
        console.print(failure, highlight=False, markup=False)
    console.print(str(write_json("agents-server", {"setting": setting(), "trace": trace, "served": served})))


def _tiers(served: Served) -> tuple[int, int]:
    return served.ram_token_count, served.ssd_token_count


def _simulated_row(served: Served, each: Outcome) -> tuple[str, ...]:
    rates = (each.hit_rate, each.ram_hit_rate, each.ssd_hit_rate)
    return (f"simulated: {each.rule}", *(f"{rate:.4f}" for rate in rates), "", "", "", "")


def plot(found: Findings) -> Path:
    """Draw hit rates by size for each rule, and hits by checkpoints held; return the file."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 5))
    left.set_title("Models whose KV can be cut")
    shares = [share for share in _shares(found.blocks) if share != EVERYTHING]
    for rule in dict.fromkeys(rule for rule, _ in found.blocks):
        rates = [found.spread(rule, share, lambda each: each.hit_rate).median for share in shares]
        left.plot([100 * share for share in shares], rates, marker="o", label=rule)
    left.set_xlabel("cache, % of all different blocks")
    left.set_ylabel("token hit rate")
    right.set_title("Models that need checkpoints")
    for share in _shares(found.checkpoints):
        rounds = [each for (_, of), each in found.checkpoints.items() if of == share]
        held = [spread_of(o.checkpoints_per_session for o in each).median for each in rounds]
        rates = [spread_of(o.hit_rate for o in each).median for each in rounds]
        right.plot(held, rates, marker="o", linestyle="none", label=f"cache of {_size(share)}")
    right.set_xlabel("checkpoints held a session, one point a rule")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    for axes in (left, right):
        if axes.lines:
            axes.legend(loc="lower right")
    figure.suptitle(found.trace)
    return save(figure, "agents")


def _shares(found: Mapping[tuple[str, float], Any]) -> list[float]:
    return sorted({share for _, share in found})


def _size(share: float) -> str:
    return "everything" if share == EVERYTHING else f"{share:.1%} of all different blocks"


def _text(spread: Spread) -> str:
    """Return the number of one round, or the median with its extremes."""
    return spread.number(4) if spread.count == 1 else spread.text(4)


def _plain(found: Mapping[tuple[str, float], Sequence[Outcome]]) -> list[dict[str, Any]]:
    return [
        {"share": share, **dataclasses.asdict(each), "rule": rule}
        for (rule, share), rounds in found.items()
        for each in rounds
    ]
