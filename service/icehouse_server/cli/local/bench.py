"""`icehouse bench`: how fast this machine prefills, decodes and restores, by a running server or its own."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from icehouse_client import Client
from icehouse_client.cli.connection import Server, failing_call_ends, server_of
from icehouse_client.cli.console import AsJson, err, out, print_json, table
from icehouse_client.cli.option_groups import with_groups

from icehouse_server.cli.local.server import serving
from icehouse_server.cli.local.speeds import PROMPT_TOKEN_COUNTS, ROW_COUNTS, Speed, SpeedBench
from icehouse_server.clock import SystemClock

_CLOCK = SystemClock()
_EVICT_TIMEOUT_S = 10.0


@with_groups(server=server_of)
def bench(
    server: Server,
    model: Annotated[
        str | None,
        typer.Argument(help="Measure a server started for this; else the running one.", show_default=False),
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Measure no longer than this.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, decode and restore in tokens a second, by the wall clock; other load slows it down.

    Restores from SSD need a restart, and so MODEL. What was restored is evicted again.
    """
    report = _of_running(server.client, limit_s=limit_s) if model is None else _of_own(model, limit_s=limit_s)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _show(report)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured."""

    model: str
    device: str
    speeds: tuple[Speed, ...]


def _of_running(client: Client, *, limit_s: float) -> Report:
    bench = SpeedBench(client, clock=_CLOCK, deadline_time=_CLOCK.monotonic() + limit_s)
    speeds, kept = _without_restart(bench)
    if kept is not None:
        client.cache.evict(kept, timeout_s=_EVICT_TIMEOUT_S)
    ssd = Speed("restore from SSD", note="needs a restart, so a server of its own: icehouse bench MODEL")
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _of_own(model: str, *, limit_s: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        first = serving(f"starting a server for {model}", scratch=Path(name), model=model)
        with first as (client, address), failing_call_ends(address):
            deadline_time = _CLOCK.monotonic() + limit_s
            bench = SpeedBench(client, clock=_CLOCK, deadline_time=deadline_time)
            speeds, kept = _without_restart(bench)
            # The restart is no part of what is measured, nor of its time.
            left_s = deadline_time - _CLOCK.monotonic()
        if kept is None:
            ssd = Speed("restore from SSD", note=speeds[-1].note)
        else:
            restarting = "starting another server on the same cache directory"
            second = serving(restarting, scratch=Path(name), model=model)
            with second as (client, address), failing_call_ends(address), err.status("restore from SSD"):
                again = SpeedBench(client, clock=_CLOCK, deadline_time=_CLOCK.monotonic() + left_s)
                ssd = again.restore(kept, tier="SSD")
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _without_restart(bench: SpeedBench) -> tuple[list[Speed], tuple[int, ...] | None]:
    """Return what one process can tell, and the prompt that it restored."""
    speeds = []
    for token_count in PROMPT_TOKEN_COUNTS:
        with err.status(f"prefill of {token_count:,} tokens"):
            speeds.append(bench.prefill(token_count))
    for row_count in ROW_COUNTS:
        with err.status(f"decode of {row_count} at once"):
            speeds.append(bench.decode(row_count))
    fitting = [count for count in PROMPT_TOKEN_COUNTS if bench.fits(count)]
    with err.status("restore from RAM"):
        kept = bench.keep(fitting[-1]) if fitting else None
        if kept is None:
            speeds.append(Speed("restore from RAM", note="no prompt could be kept in the time left"))
        else:
            speeds.append(bench.restore(kept, tier="RAM"))
    return speeds, kept if speeds[-1].tokens_per_s is not None else None


def _show(report: Report) -> None:
    out.print(f"{report.model} on the {report.device}", markup=False)
    figures = ("tokens/s", "tokens", "seconds")
    shown = table("", *figures, figures=figures)
    for speed in report.speeds:
        if speed.tokens_per_s is None:
            shown.add_row(speed.name, "–", "–", "–")
        else:
            rate = f"{speed.tokens_per_s:,.1f}" if speed.tokens_per_s < 100 else f"{speed.tokens_per_s:,.0f}"
            shown.add_row(speed.name, rate, f"{speed.token_count:,}", f"{speed.duration_s:.2f}")
    out.print(shown)
    for speed in report.speeds:
        if speed.note:
            err.print(f"{speed.name}: {speed.note}", style="dim", markup=False)
