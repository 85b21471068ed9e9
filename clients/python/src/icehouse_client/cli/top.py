"""`icehouse top`: what a running server does, where its tokens come from and what took long, until Ctrl-C."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import typer
from icehouse.v1.cache_stats_pb2 import CacheSharedStats, CacheStats
from icehouse.v1.engine_stats_pb2 import EngineStats
from icehouse.v1.group_stats_pb2 import RankState, RankStats
from icehouse.v1.server_service_pb2 import ModelStats, ServerStats
from icehouse.v1.slow_request_pb2 import SlowRequest
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from icehouse_client.cli.connection import Server, failure_text, server_of
from icehouse_client.cli.console import AsJson, facts_table, out, print_json, printable, table
from icehouse_client.cli.figures import age_text, duration_text, share_text, size_text
from icehouse_client.cli.option_groups import with_groups
from icehouse_client.errors import IcehouseClientError
from icehouse_client.results import seconds

_HISTORY_COUNT = 30
_BARS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10
_ID_WIDTH = 16
_ALARM = "bold red"


@with_groups(server=server_of)
def top(
    server: Server,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen, with rates since the server's start, and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running server live: throughput, queue, cache tiers, SSD traffic, slowest requests."""
    if not (once or as_json):
        with contextlib.suppress(KeyboardInterrupt):
            _show(server, interval_s=interval_s)
        return
    looks = server.client.watch_stats(interval_s=interval_s)
    with contextlib.closing(looks), contextlib.suppress(KeyboardInterrupt):
        for stats in itertools.islice(looks, 1 if once else None):
            if as_json:
                print_json(stats, indent=None)
            else:
                out.print(screen(stats, rates_between(None, stats), address=server.address))


def _show(server: Server, *, interval_s: float) -> None:
    """Draw every look until Ctrl-C; a server that goes away is waited for."""
    history: collections.deque[float] = collections.deque(maxlen=_HISTORY_COUNT)
    earlier: ServerStats | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        for stats, notice in looks(server, interval_s=interval_s):
            rates = rates_between(earlier, stats)
            if not notice:
                history.append(rates.output_tokens_per_s)
            shown = screen(stats, rates, address=server.address, history=history, notice=notice)
            live.update(shown, refresh=True)
            earlier = stats


def looks(server: Server, *, interval_s: float) -> Iterator[tuple[ServerStats, str]]:
    """Yield looks and, when the server has gone, the last one once more with what happened.

    Raises IcehouseClientError when there was none at first, or when the server refuses.
    """
    pause = threading.Event()
    last: ServerStats | None = None
    while True:
        try:
            for stats in server.client.watch_stats(interval_s=interval_s, waits=last is not None):
                last = stats
                yield stats, ""
        except IcehouseClientError as error:
            if last is None or error.code.name != "UNAVAILABLE":
                raise
            yield last, f"the server does not answer, waiting for it: {failure_text(error, server.address)}"
            # One that loads or drains refuses at once.
            pause.wait(interval_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Per second. `hit_ratio` is of prompt tokens, None when no prompt was looked up meanwhile."""

    finished_per_s: float
    refused_per_s: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    reused_tokens_per_s: float
    written_bytes_per_s: float
    read_bytes_per_s: float
    hit_ratio: float | None


def rates_between(earlier: ServerStats | None, later: ServerStats) -> Rates:
    """Return the rates from `earlier` to `later`; since the engine's start where there is no earlier one.

    A server that was restarted in between has smaller totals: its rates are since its start too.
    """
    elapsed_s = seconds(later.engine.uptime)
    if earlier is None or not earlier.HasField("engine") or seconds(earlier.engine.uptime) > elapsed_s:
        earlier = ServerStats()
    else:
        elapsed_s = (later.collect_time.ToNanoseconds() - earlier.collect_time.ToNanoseconds()) / 1e9

    def grown(total: Callable[[ServerStats], int]) -> int:
        return total(later) - total(earlier)

    def per_s(total: Callable[[ServerStats], int]) -> float:
        return grown(total) / elapsed_s if elapsed_s > 0 else 0.0

    reused = grown(lambda s: s.cache.lookups.ram_token_total + s.cache.lookups.ssd_token_total)
    looked_up = reused + grown(lambda s: s.cache.lookups.miss_token_total)
    return Rates(
        finished_per_s=per_s(lambda s: s.engine.finished_total),
        refused_per_s=per_s(lambda s: s.engine.rejected_total + s.engine.failed_total),
        output_tokens_per_s=per_s(lambda s: s.engine.output_token_total),
        prefill_tokens_per_s=per_s(lambda s: s.engine.prefilled_token_total),
        reused_tokens_per_s=per_s(lambda s: s.engine.cached_token_total),
        written_bytes_per_s=per_s(lambda s: s.cache.spill.persisted_byte_total),
        read_bytes_per_s=per_s(lambda s: s.cache.promote.read_byte_total),
        hit_ratio=reused / looked_up if looked_up > 0 else None,
    )


def screen(
    stats: ServerStats, rates: Rates, *, address: str, history: Sequence[float] = (), notice: str = ""
) -> RenderableType:
    """Return the whole screen; `history` is of output tokens per second, `notice` a line of trouble."""
    title = Text.assemble(("icehouse ", "bold"), address)
    parts: list[RenderableType] = [title]
    if notice:
        parts.append(Text(notice, style=_ALARM))
    if stats.HasField("engine"):
        title.append(f" · up {age_text(seconds(stats.engine.uptime))}", style="dim")
        parts.append(_now(stats.engine, rates, history))
    elif not stats.models:
        parts.append(Text("only your own requests are shown; an operator's token shows the rest"))
    if stats.HasField("cache"):
        parts += [Text(), _tiers(stats.cache), _traffic(stats.cache, rates)]
    if stats.HasField("group"):
        parts += [Text(), _ranks(stats.group.ranks)]
        parts += [
            Text(f"rank {rank.rank}: {printable(rank.ssd_trouble)}", style=_ALARM)
            for rank in stats.group.ranks
            if rank.ssd_trouble
        ]
    if stats.models:
        parts += [Text(), _models(stats.models)]
    parts += [Text(), _slowest(stats.slowest_requests)]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Return a bar a value, the highest of them full."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[max(0, round(value / top * (len(_BARS) - 1)))] for value in values)


def _now(engine: EngineStats, rates: Rates, history: Sequence[float]) -> Table:
    is_full = engine.waiting_limit > 0 and engine.waiting_count >= 0.8 * engine.waiting_limit
    requests = Text.assemble(
        f"{engine.decoding_count} of {engine.decoding_limit} decoding, "
        f"{engine.prefilling_count} in prefill, {engine.loading_count} loading, ",
        (f"{engine.waiting_count} of {engine.waiting_limit} waiting", _ALARM if is_full else ""),
    )
    ends = Text.assemble(
        f"{rates.finished_per_s:.1f} finished, ",
        (f"{rates.refused_per_s:.1f} refused or failed", _ALARM if rates.refused_per_s > 0 else ""),
    )
    tokens = Text.assemble(
        (f"{rates.output_tokens_per_s:,.0f}", "bold"),
        f" written, {rates.prefill_tokens_per_s:,.0f} prefilled, {rates.reused_tokens_per_s:,.0f} reused "
        f"({share_text(rates.hit_ratio)})  ",
        (sparkline(history), "cyan"),
    )
    p50 = duration_text(seconds(engine.decode_step_duration_p50))
    p99 = duration_text(seconds(engine.decode_step_duration_p99))
    step = f"{p50}, 1 in 100 over {p99} · memory {size_text(engine.active_memory_bytes)}"
    if engine.memory_limit_bytes:
        step += f" of {size_text(engine.memory_limit_bytes)}"
    return facts_table(
        ("requests", requests), ("per second", ends), ("tokens/s", tokens), ("decode step", step)
    )


def _ranks(ranks: Iterable[RankStats]) -> Table:
    """Return a line for each machine of the group."""
    shown = _table("rank", "state", "behind", "memory", "blocks", "on SSD", "written", "read", "lost")
    for rank in ranks:
        is_ready, ssd = rank.state == RankState.RANK_STATE_READY, rank.ssd
        lost = ssd.dropped_block_total + ssd.evicted_block_total + ssd.damaged_block_total
        tier = [
            f"{ssd.block_count:,}",
            *map(size_text, (ssd.size_bytes, ssd.written_byte_total, ssd.read_byte_total)),
            Text(f"{lost:,}", style=_ALARM if ssd.damaged_block_total else ""),
        ]
        shown.add_row(
            Text(f"{rank.rank} {printable(rank.host)}"),
            Text(_state_text(rank), style="" if is_ready else _ALARM),
            f"{rank.behind_order_count:,}" if rank.rank else "",
            size_text(rank.active_memory_bytes),
            *(tier if rank.HasField("ssd") else ("none", "", "", "", "")),
        )
    return shown


def _state_text(rank: RankStats) -> str:
    known = RankState.DESCRIPTOR.values_by_number.get(rank.state)
    return known.name.removeprefix("RANK_STATE_").lower() if known else str(rank.state)


def _models(models: Iterable[ModelStats]) -> Table:
    shown = _table("loaded model", "up", "decoding", "waiting", "written", "RAM tier")
    for model in models:
        engine = model.engine
        shown.add_row(
            Text(printable(model.model)),
            age_text(seconds(engine.uptime)),
            f"{engine.decoding_count:,}",
            f"{engine.waiting_count:,}",
            f"{engine.output_token_total:,} tokens",
            size_text(model.cache.ram.size_bytes),
        )
    return shown


def _tiers(cache: CacheStats) -> Table:
    tiers = _table("tier", "blocks", "size", "", "evicted", "age", "reused")
    lookups = cache.lookups
    rows = [("RAM", cache.ram, lookups.ram_token_total)]
    if cache.HasField("ssd"):
        rows.append(("SSD", cache.ssd, lookups.ssd_token_total))
    for name, tier, reused in rows:
        tiers.add_row(
            name,
            f"{tier.block_count:,}",
            f"{size_text(tier.size_bytes)} of {size_text(tier.limit_bytes)}",
            ProgressBar(max(1, tier.limit_bytes), tier.size_bytes, width=_BAR_WIDTH),
            f"{tier.evicted_block_total:,}",
            age_text(seconds(tier.age.p50)),
            f"{reused:,} tokens",
        )
    return tiers


def _traffic(cache: CacheStats, rates: Rates) -> Text:
    spill, found = cache.spill, cache.integrity
    damaged = found.checksum_failure_total + found.header_mismatch_total + found.missing_file_total
    damaged += found.seal_failure_total
    queue = share_text(spill.queue_bytes / spill.queue_limit_bytes if spill.queue_limit_bytes else None)
    text = Text.assemble(
        f"spill {size_text(round(rates.written_bytes_per_s))}/s, "
        f"restore {size_text(round(rates.read_bytes_per_s))}/s, write queue {queue} full, "
        f"{sum(drop.block_total for drop in spill.drops):,} blocks not written, ",
        (f"{damaged:,} damaged", _ALARM if damaged else ""),
    )
    # Of an absent message every field is empty.
    if cache.disk.raw_block_bytes:
        share = share_text(cache.disk.block_bytes / cache.disk.raw_block_bytes)
        text.append(f"\nfiles on SSD take {share} of their KV's size")
        if cache.disk.decompress_bytes_per_second:
            text.append(f", decompressed at {size_text(round(cache.disk.decompress_bytes_per_second))}/s")
    if cache.disk.writes_off_detail:
        text.append(f"\nnot writing to SSD: {printable(cache.disk.writes_off_detail)}", style=_ALARM)
    if cache.disk.hang_detail:
        text.append(f"\n{printable(cache.disk.hang_detail)}", style=_ALARM)
    if cache.HasField("shared"):
        _add_shared(text, cache.shared)
    return text


def _add_shared(text: Text, shared: CacheSharedStats) -> None:
    text.append(
        f"\nobject store: {shared.fetched_block_total:,} blocks fetched, "
        f"{shared.stored_block_total:,} stored, {shared.queue_count:,} waiting"
    )
    if shared.refused_block_total:
        text.append(f", {shared.refused_block_total:,} refused", style=_ALARM)
    for what, detail in (("fetched", shared.read_pause_detail), ("stored", shared.write_pause_detail)):
        if detail:
            text.append(f"\nno blocks are {what}: {printable(detail)}", style=_ALARM)


def _slowest(slowest: Sequence[SlowRequest]) -> Table:
    found = _table("slowest", "ago", "total", "queue", "restore", "prefill", "decode", "tokens")
    for request in slowest:
        name = printable(request.request_id)
        # A stage that it did not come to is absent.
        prefill_s = seconds(request.prefill_duration) if request.HasField("prefill_duration") else None
        decode_s = seconds(request.decode_duration) if request.HasField("decode_duration") else None
        found.add_row(
            Text(name if len(name) <= _ID_WIDTH else f"{name[: _ID_WIDTH - 1]}…"),
            age_text(seconds(request.age)),
            Text(
                duration_text(seconds(request.total_duration)), style="" if request.code == "OK" else _ALARM
            ),
            duration_text(seconds(request.queue_duration)),
            duration_text(seconds(request.restore_duration) or None),
            duration_text(prefill_s),
            duration_text(decode_s),
            f"{request.cached_tokens:,}/{request.prompt_tokens:,} → {request.output_tokens:,}",
        )
    return found


def _table(*names: str) -> Table:
    return table(*names, figures=names[1:], space=1)
