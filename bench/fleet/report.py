"""What the fleet's bench says of a run: the table, verdicts on the targets, the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from bench.fleet.overhead import Pair
from bench.fleet.restore import StoreFacts
from bench.fleet.sessions import Shape
from bench.fleet.workload import AWARE, ONE, TURNS, Played
from bench.plots import save
from bench.report import (
    Spread,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)

HIT_RATE_TARGET = 0.9
ADDED_TARGET_MS = 15.0
_ARRANGEMENTS = (ONE.name, AWARE.name, TURNS.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """All that one run measured."""

    shape: Shape
    sizes: Mapping[str, Any]
    played: Sequence[Played]
    pairs: Sequence[Pair]
    store: StoreFacts

    def of(self, arrangement: str) -> list[Played]:
        """Return an arrangement's rounds."""
        return [each for each in self.played if each.arrangement == arrangement]

    def spread(self, arrangement: str, number: Callable[[Played], float]) -> Spread:
        """Return a number's spread over an arrangement's rounds."""
        return spread_of(number(each) for each in self.of(arrangement))


def report(found: Findings) -> None:
    """Print table and verdicts; write bench/out/fleet.json and .png."""
    rows = [_row(found, name) for name in _ARRANGEMENTS]
    show_table(
        f"Agents' sessions, {found.of(ONE.name)[0].request_count} turns, medians (min to max) of the rounds",
        (
            *("workers", "token hit rate", "computed, of one's", "TTFT ms p50", "p95"),
            *("MB written", "turns by worker", "failed"),
        ),
        rows,
    )
    for each in found.played:
        for failure in each.failures:
            console.print(f"{each.arrangement}: {failure}", highlight=False, markup=False)
    _show_overhead(found.pairs)
    verdicts = verdicts_of(found)
    show_verdicts(verdicts)
    console.print(simulation_line(found), highlight=False, soft_wrap=True)
    content = {"setting": setting(), **dataclasses.asdict(found), "targets": verdicts}
    console.print(str(write_json("fleet", content)))
    console.print(str(plot_fleet(found)))


def verdicts_of(found: Findings) -> list[Verdict]:
    """Return the targets with what was measured."""
    kept = ratios(_whole_hit_rates(found, AWARE.name), _whole_hit_rates(found, ONE.name))
    added = spread_of(1000 * pair.added_s for pair in found.pairs)
    return [
        Verdict("token hit rate, two cache-aware / one", kept, HIT_RATE_TARGET, at_least=True),
        Verdict("TTFT added by the gateway, ms", added, ADDED_TARGET_MS, at_least=False),
    ]


def _whole_hit_rates(found: Findings, arrangement: str) -> list[float | None]:
    """Return the rate of each round; None where sessions broke off, which are other prompts then."""
    return [None if each.failures else each.hit_rate for each in found.of(arrangement)]


def _row(found: Findings, name: str) -> tuple[str, ...]:
    computed = ratios(
        [1 - each.hit_rate for each in found.of(name)], [1 - each.hit_rate for each in found.of(ONE.name)]
    )
    latest = found.of(name)[-1]
    return (
        name,
        _text(found.spread(name, lambda each: each.hit_rate), 3),
        computed.number(),
        _text(found.spread(name, lambda each: 1000 * each.ttft_p50_s), 0),
        _text(found.spread(name, lambda each: 1000 * each.ttft_p95_s), 0),
        _text(found.spread(name, lambda each: each.written_bytes / 1e6), 1),
        " ".join(str(count) for count in latest.accepted.values()),
        str(sum(len(each.failures) for each in found.of(name))),
    )


def _text(spread: Spread, digits: int) -> str:
    """Return the number of one round, or the median with its extremes."""
    return spread.number(digits) if spread.count == 1 else spread.text(digits)


def _show_overhead(pairs: Sequence[Pair]) -> None:
    show_table(
        f"Time to first token of a warm prompt, {len(pairs)} pairs",
        ("way", "ms median (min to max)"),
        (
            ("through the gateway (HTTP)", spread_of(1000 * pair.gateway_s for pair in pairs).text(1)),
            ("directly (gRPC)", spread_of(1000 * pair.direct_s for pair in pairs).text(1)),
            ("added, pair by pair", spread_of(1000 * pair.added_s for pair in pairs).text(1)),
        ),
    )


def simulation_line(found: Findings) -> str:
    """Return the command that simulates more workers with what one was measured to do."""
    prefill = found.spread(ONE.name, lambda each: each.prefill_tokens_per_s).median
    decode = found.spread(ONE.name, lambda each: each.output_tokens_per_s).median
    added_ms = 1000 * spread_of(pair.added_s for pair in found.pairs).median
    store = found.store
    return (
        "more workers: make bench CASE=growth "
        f'ARGS="--prefill {prefill:.0f} --decode {decode:.0f} --restore {store.restore_tokens_per_s:.0f} '
        f'--kv-kib {store.kv_bytes_per_token / 1024:g} --gateway-ms {max(0.0, added_ms):.1f}"'
    )


def plot_fleet(found: Findings) -> Path:
    """Draw hits, first tokens and bytes by arrangement; return the file."""
    figure, (hits, ttft, written) = pyplot.subplots(1, 3, figsize=(14, 4))
    _bars(hits, found, "Prompt tokens reused, %", {"": lambda each: 100 * each.hit_rate})
    both = {"p50": lambda each: 1000 * each.ttft_p50_s, "p95": lambda each: 1000 * each.ttft_p95_s}
    _bars(ttft, found, "Time to first token, ms", both)
    _bars(written, found, "Written by the stores, MB", {"": lambda each: each.written_bytes / 1e6})
    figure.suptitle("Agents' sessions; medians over the rounds of one run, bars from least to most")
    return save(figure, "fleet")


def _bars(axes: Any, found: Findings, title: str, numbers: Mapping[str, Callable[[Played], float]]) -> None:
    """Draw each number of each arrangement, the numbers beside each other."""
    axes.set_title(title)
    width = 0.8 / len(numbers)
    for place, (label, number) in enumerate(numbers.items()):
        spreads = [found.spread(name, number) for name in _ARRANGEMENTS]
        below = [spread.median - spread.minimum for spread in spreads]
        above = [spread.maximum - spread.median for spread in spreads]
        places = [index + place * width for index in range(len(spreads))]
        axes.bar(
            places, [s.median for s in spreads], width, yerr=(below, above), capsize=3, label=label or None
        )
    axes.set_xticks(range(len(_ARRANGEMENTS)), _ARRANGEMENTS)
    axes.set_ylim(bottom=0)
    if len(numbers) > 1:
        axes.legend()
