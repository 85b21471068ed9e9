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
from icehouse_server.cli.terminal.console import AsJson, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups

if TYPE_CHECKING:
    from icehouse_client import Client

    from icehouse_server.domain.stats import ServerStats

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
    from icehouse_server.cli.client.connection import connected

    with connected(target) as client:
        if as_json:
            _print_facts(client, interval_s=interval_s, once=once)
        elif once:
            _print_once(client, target.address)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                _show(client, target.address, interval_s=interval_s)


def _print_facts(client: Client, *, interval_s: float, once: bool) -> None:
    """Print each look as a line of JSON."""
    from icehouse_server.rpc.messages.message_json import message_facts

    looks = client.cache.watch_stats(interval_s=interval_s)
    with contextlib.closing(looks), contextlib.suppress(KeyboardInterrupt):
        for stats in itertools.islice(looks, 1) if once else looks:
            print_json(message_facts(stats), indent=None)


def _print_once(client: Client, address: str) -> None:
    from icehouse_server.cli.top.rates import rates_between
    from icehouse_server.cli.top.view import screen
    from icehouse_server.domain.stats import ServerStats
    from icehouse_server.rpc.messages.proto_map import from_proto

    with contextlib.closing(client.cache.watch_stats()) as looks:
        stats = from_proto(next(looks), ServerStats)
    out.print(screen(stats, rates_between(None, stats), address=address, history=()))


def _show(client: Client, address: str, *, interval_s: float) -> None:
    """Draw every look until Ctrl-C; a server that goes away is waited for."""
    from rich.live import Live

    from icehouse_server.cli.top.rates import rates_between
    from icehouse_server.cli.top.view import screen

    history: collections.deque[float] = collections.deque(maxlen=_HISTORY_COUNT)
    earlier: ServerStats | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        for stats, notice in _looks(client, address, interval_s=interval_s):
            rates = rates_between(earlier, stats)
            if not notice:
                history.append(rates.output_tokens_per_s)
            live.update(screen(stats, rates, address=address, history=history, notice=notice), refresh=True)
            earlier = stats


def _looks(client: Client, address: str, *, interval_s: float) -> Iterator[tuple[ServerStats, str]]:
    """Yield looks and, when the server has gone, the last one once more with what happened.

    Raises IcehouseClientError when there was none at first, or when the server refuses.
    """
    from icehouse_client import IcehouseClientError

    from icehouse_server.cli.client.connection import failure_text
    from icehouse_server.domain.stats import ServerStats
    from icehouse_server.rpc.messages.proto_map import from_proto

    pause = threading.Event()
    last: ServerStats | None = None
    while True:
        try:
            for stats in client.cache.watch_stats(interval_s=interval_s, waits=last is not None):
                last = from_proto(stats, ServerStats)
                yield last, ""
        except IcehouseClientError as error:
            if last is None or error.code.name != "UNAVAILABLE":
                raise
            yield last, f"the server is away, waiting for it: {failure_text(error, address)}"
            # One that loads or drains refuses at once.
            pause.wait(interval_s)
