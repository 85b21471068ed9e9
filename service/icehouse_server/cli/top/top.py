"""`icehouse top`: a running server, live in a terminal, until Ctrl-C."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, complain, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups

if TYPE_CHECKING:
    from icehouse_server.domain.stats import ServerStats
    from icehouse_server.rpc.client.watch_stats import StatsWatch

_HISTORY_COUNT = 30


@with_groups(target=target_of)
def top(
    target: Target,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen, with rates since the server's start, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running server live: throughput, queue, cache tiers, SSD traffic, slowest requests."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.rpc.client.generate import CallFailed
    from icehouse_server.rpc.client.watch_stats import StatsWatch

    with StatsWatch(target.address, target.access) as watch:
        try:
            if as_json:
                _print_facts(watch, interval_s=interval_s, once=once)
            elif once:
                _print_once(watch)
            else:
                with contextlib.suppress(KeyboardInterrupt):
                    _show(watch, interval_s=interval_s)
        except CallFailed as error:
            complain(str(error))
            raise typer.Exit(1) from error


def _print_facts(watch: StatsWatch, *, interval_s: float, once: bool) -> None:
    """Print each look as a line of JSON."""
    samples = watch.facts(interval_s=interval_s)
    with contextlib.closing(samples), contextlib.suppress(KeyboardInterrupt):
        for facts in itertools.islice(samples, 1) if once else samples:
            print_json(facts, indent=None)


def _print_once(watch: StatsWatch) -> None:
    from icehouse_server.cli.top.rates import rates_between
    from icehouse_server.cli.top.view import screen

    with contextlib.closing(watch.samples(interval_s=1.0, wait=False)) as samples:
        stats = next(samples)
    out.print(screen(stats, rates_between(None, stats), address=watch.address, history=()))


def _show(watch: StatsWatch, *, interval_s: float) -> None:
    """Draw every look until Ctrl-C; a server that goes away is waited for."""
    from rich.live import Live

    from icehouse_server.cli.top.rates import rates_between
    from icehouse_server.cli.top.view import screen

    history: collections.deque[float] = collections.deque(maxlen=_HISTORY_COUNT)
    earlier: ServerStats | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        for stats, notice in _looks(watch, interval_s=interval_s):
            rates = rates_between(earlier, stats)
            if not notice:
                history.append(rates.output_tokens_per_s)
            live.update(
                screen(stats, rates, address=watch.address, history=history, notice=notice), refresh=True
            )
            earlier = stats


def _looks(watch: StatsWatch, *, interval_s: float) -> Iterator[tuple[ServerStats, str]]:
    """Yield looks and, when the server has gone, the last one once more with what happened.

    Raises CallFailed when there was none at first, or when the server refuses.
    """
    from icehouse_server.rpc.client.generate import CallFailed

    pause = threading.Event()
    last: ServerStats | None = None
    while True:
        try:
            for stats in watch.samples(interval_s=interval_s, wait=last is not None):
                last = stats
                yield stats, ""
        except CallFailed as error:
            if last is None or error.code != "UNAVAILABLE":
                raise
            yield last, f"the server is away, waiting for it: {error}"
            # One that loads or drains refuses at once.
            pause.wait(interval_s)
