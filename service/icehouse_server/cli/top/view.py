"""Screen of `icehouse top`: what the server does now, where its tokens come from, what took long."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from icehouse_server.cli.cache.block_facts import age_text
from icehouse_server.cli.top.rates import Rates
from icehouse_server.config.setting import size_text
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.stats import EngineStats, ServerStats, SlowRequest

_BARS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10
_ID_WIDTH = 16
_ALARM = "bold red"


def screen(
    stats: ServerStats, rates: Rates, *, address: str, history: Sequence[float], notice: str = ""
) -> RenderableType:
    """Return the whole screen; `history` is of output tokens per second, `notice` a line of trouble."""
    parts: list[RenderableType] = [_title(stats, address)]
    if notice:
        parts.append(Text(notice, style=_ALARM))
    if stats.engine is None:
        parts.append(
            Text("the server shows a tenant its own requests only; an operator's token shows the rest")
        )
    else:
        parts.append(_now(stats.engine, rates, history))
    if stats.cache is not None:
        parts += [Text(), _tiers(stats.cache), _traffic(stats.cache, rates)]
    parts += [Text(), _slowest(stats.slowest_requests)]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Return a bar a value, the highest of them full."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[max(0, round(value / top * (len(_BARS) - 1)))] for value in values)


def duration_text(duration_s: float | None) -> str:
    """Return a duration in the unit that suits it: "34 ms", "2.31 s", "5 min"; "–" where there was none."""
    if duration_s is None:
        return "–"
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    return f"{duration_s:.2f} s" if duration_s < 120 else f"{duration_s / 60:.0f} min"


def printable(text: str) -> str:
    """Return a caller's own text without anything that a terminal obeys."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _title(stats: ServerStats, address: str) -> Text:
    title = Text.assemble(("icehouse ", "bold"), address)
    if stats.engine is not None:
        title.append(f" · up {age_text(0.0, now_time_s=stats.engine.uptime_s)}", style="dim")
    return title


def _now(engine: EngineStats, rates: Rates, history: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    is_full = engine.waiting_limit > 0 and engine.waiting_count >= 0.8 * engine.waiting_limit
    table.add_row(
        "requests",
        Text.assemble(
            f"{engine.decoding_count} of {engine.decoding_limit} decoding, "
            f"{engine.prefilling_count} in prefill, {engine.loading_count} loading, ",
            (f"{engine.waiting_count} of {engine.waiting_limit} waiting", _ALARM if is_full else ""),
        ),
    )
    table.add_row(
        "per second",
        Text.assemble(
            f"{rates.finished_per_s:.1f} finished, ",
            (f"{rates.refused_per_s:.1f} refused or failed", _ALARM if rates.refused_per_s > 0 else ""),
        ),
    )
    table.add_row(
        "tokens/s",
        Text.assemble(
            (f"{rates.output_tokens_per_s:,.0f}", "bold"),
            f" written, {rates.prefill_tokens_per_s:,.0f} prefilled, {rates.reused_tokens_per_s:,.0f} reused "
            f"({_share_text(rates.hit_ratio)})  ",
            (sparkline(history), "cyan"),
        ),
    )
    memory = size_text(engine.active_memory_bytes)
    if engine.memory_limit_bytes:
        memory += f" of {size_text(engine.memory_limit_bytes)}"
    table.add_row(
        "decode step",
        f"{duration_text(engine.decode_step_p50_s)}, 1 in 100 over {duration_text(engine.decode_step_p99_s)}"
        f" · memory {memory}",
    )
    return table


def _tiers(cache: CacheStats) -> Table:
    table = _table("tier", "blocks", "size", "", "evicted", "age", "reused")
    lookups = cache.lookups
    for name, tier, reused in (
        ("RAM", cache.ram, lookups.ram_token_total),
        ("SSD", cache.ssd, lookups.ssd_token_total),
    ):
        if tier is None:
            continue
        table.add_row(
            name,
            f"{tier.block_count:,}",
            f"{size_text(tier.size_bytes)} of {size_text(tier.limit_bytes)}",
            ProgressBar(max(1, tier.limit_bytes), tier.size_bytes, width=_BAR_WIDTH),
            f"{tier.evicted_block_total:,}",
            age_text(0.0, now_time_s=tier.age.p50_s),
            f"{reused:,} tokens",
        )
    return table


def _traffic(cache: CacheStats, rates: Rates) -> Text:
    spill, damaged = cache.spill, cache.integrity.damaged_block_total
    limit_bytes = spill.queue_limit_bytes
    queue = _share_text(spill.queue_bytes / limit_bytes if limit_bytes else None)
    text = Text.assemble(
        f"spill {size_text(round(rates.written_bytes_per_s))}/s, "
        f"restore {size_text(round(rates.read_bytes_per_s))}/s, write queue {queue} full, "
        f"{sum(drop.block_total for drop in spill.drops):,} blocks not written, ",
        (f"{damaged:,} damaged", _ALARM if damaged else ""),
    )
    if cache.disk is not None and cache.disk.writes_off_detail:
        text.append(f"\nnothing is written: {printable(cache.disk.writes_off_detail)}", style=_ALARM)
    if cache.disk is not None and cache.disk.hang_detail:
        text.append(f"\n{printable(cache.disk.hang_detail)}", style=_ALARM)
    return text


def _slowest(slowest: Sequence[SlowRequest]) -> Table:
    table = _table("slowest", "ago", "total", "queue", "restore", "prefill", "decode", "tokens")
    for request in slowest:
        name = printable(request.request_id)
        table.add_row(
            Text(name if len(name) <= _ID_WIDTH else f"{name[: _ID_WIDTH - 1]}…"),
            age_text(0.0, now_time_s=request.age_s),
            Text(duration_text(request.total_duration_s), style="" if request.code == "OK" else _ALARM),
            duration_text(request.queue_duration_s),
            duration_text(request.restore_duration_s or None),
            duration_text(request.prefill_duration_s),
            duration_text(request.decode_duration_s),
            f"{request.cached_token_count:,}/{request.prompt_token_count:,} → {request.output_token_count:,}",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _share_text(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
