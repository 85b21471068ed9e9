"""`icehouse top`: a running server, live in a terminal, until Ctrl-C."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.terminal.console import address_of, complain, out
from icehouse_server.config import load_config
from icehouse_server.errors import ConfigError, Reason

if TYPE_CHECKING:
    from icehouse_server.domain.stats import ServerStats
    from icehouse_server.rpc.client.watch_stats import Access, StatsWatch

_HISTORY_COUNT = 30


def top(
    address: Annotated[
        str | None, typer.Option(help="host:port or unix:/path; by default where `serve` would listen.")
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen, with rates since the server's start, and end.")
    ] = False,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file with the root certificates of a server with TLS.")
    ] = None,
    token: Annotated[
        Path | None, typer.Option(help="File with the bearer token; an operator's shows everything.")
    ] = None,
) -> None:
    """Show a running server live: throughput, queue, cache tiers, SSD traffic, slowest requests."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.rpc.client.generate import CallFailed
    from icehouse_server.rpc.client.watch_stats import StatsWatch

    access = _access(ca, token)
    with StatsWatch(address or address_of(load_config().config.server), access) as watch:
        try:
            if once:
                _print_once(watch)
            else:
                with contextlib.suppress(KeyboardInterrupt):
                    _show(watch, interval_s=interval_s)
        except CallFailed as error:
            complain(str(error))
            raise typer.Exit(1) from error


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


def _access(ca: Path | None, token: Path | None) -> Access:
    from icehouse_server.rpc.client.watch_stats import Access

    return Access(
        root_certificates=_content("--ca", ca) if ca is not None else None,
        token=_content("--token", token).decode().strip() if token is not None else "",
    )


def _content(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{flag} names {path}, which cannot be read ({error.strerror}); name a readable file",
            field=flag.removeprefix("--"),
        ) from error
