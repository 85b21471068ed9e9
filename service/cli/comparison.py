"""One prompt served from each tier: what it cost, and whether the texts are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from service.rpc.dial import Summary

_BAR_WIDTH = 20
"""Columns of the longest bar; with the other columns 80 are enough."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One call: how it is named to people, what it said, and what it cost."""

    name: str
    text: str
    summary: Summary


def texts_are_equal(passes: Sequence[Pass]) -> bool:
    """Whether every pass said the same, and said something."""
    return len({each.text for each in passes}) == 1 and passes[0].text != ""


def comparison_table(passes: Sequence[Pass]) -> Table:
    """Return a row for each pass, with a bar as long as its time to first token."""
    longest_s = max(each.summary.ttft_s for each in passes)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("the same prompt", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("reused", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in passes:
        bar = Bar(longest_s, 0, each.summary.ttft_s, width=_BAR_WIDTH, color="cyan")
        table.add_row(each.name, f"{each.summary.ttft_s * 1000:,.0f} ms", _reused_text(each.summary), bar)
    return table


def verdict_text(passes: Sequence[Pass]) -> Text:
    """Return one line: how much sooner the later passes began, and whether all said the same."""
    if not texts_are_equal(passes):
        return Text("the texts differ, and they must not: please report this", style="bold red")
    cold, *others = passes
    speeds = [f"{each.name} {_times_sooner(cold, each)}" for each in others]
    return Text(f"the {len(passes)} texts are equal; {', '.join(speeds)}", style="green")


def _times_sooner(cold: Pass, warm: Pass) -> str:
    if warm.summary.ttft_s <= 0:
        return "at once"
    times = cold.summary.ttft_s / warm.summary.ttft_s
    return f"{times:.0f} × sooner" if times >= 10 else f"{times:.1f} × sooner"


def _reused_text(summary: Summary) -> str:
    tiers = [(summary.ram_token_count, "RAM"), (summary.ssd_token_count, "SSD")]
    parts = [f"{count:,} {tier}" for count, tier in tiers if count]
    return f"{' + '.join(parts) or 0} of {summary.prompt_token_count:,}"
