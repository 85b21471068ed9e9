"""`icehouse bench`: how fast this machine prefills, decodes and restores, by a running server or its own."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from icehouse_client import CacheUse, Client, IcehouseClientError, Options, Usage
from icehouse_client.cli.connection import Server, failing_call_ends, server_of
from icehouse_client.cli.console import AsJson, err, out, print_json, table
from icehouse_client.cli.option_groups import with_groups

from icehouse_server.cli.local.child_server import serving
from icehouse_server.clock import Clock, SystemClock

_CLOCK = SystemClock()
_EVICT_TIMEOUT_S = 10.0
_PROMPT_TOKEN_COUNTS = (512, 2048)
_ROW_COUNTS = (1, 8)
_DECODE_TOKEN_COUNT = 64
_DECODE_PROMPT_TOKEN_COUNT = 16
_ALPHABET = "The quick brown fox jumps over the lazy dog, and then what happens to the dog? Nobody knows. "


@with_groups(server=server_of)
def bench(
    server: Server,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Start a server for this model and measure it; by default the running one.",
            show_default=False,
        ),
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Measure no longer than this.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, decode and restore in tokens a second, by the wall clock; other load slows it down.

    Restores from SSD need a restart, so only MODEL measures them. What was restored is evicted again.
    """
    report = _of_running(server.client, limit_s=limit_s) if model is None else _of_own(model, limit_s=limit_s)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _show(report)


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """One measurement. If there is no rate, `note` says why."""

    name: str
    tokens_per_s: float | None = None
    token_count: int = 0
    duration_s: float = 0.0
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All measurements."""

    model: str
    device: str
    speeds: tuple[Speed, ...]


def _of_running(client: Client, *, limit_s: float) -> Report:
    bench = SpeedBench(client, clock=_CLOCK, limit_s=limit_s)
    speeds, prompt = _without_restart(bench)
    if prompt:
        client.cache.evict(prompt, timeout_s=_EVICT_TIMEOUT_S)
    ssd = Speed("restore from SSD", note="needs a restart; icehouse bench MODEL starts a server for that")
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _of_own(model: str, *, limit_s: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        first = serving(f"starting a server for {model}", scratch=Path(name), model=model)
        with first as (client, address), failing_call_ends(address):
            bench = SpeedBench(client, clock=_CLOCK, limit_s=limit_s)
            speeds, prompt = _without_restart(bench)
            # The restart is neither measured nor counted in the time limit.
            left_s = bench.left_s
        ssd = Speed("restore from SSD", note=speeds[-1].note)
        if prompt:
            restarting = "starting another server on the same cache directory"
            second = serving(restarting, scratch=Path(name), model=model)
            with second as (client, address), failing_call_ends(address):
                again = SpeedBench(client, clock=_CLOCK, limit_s=left_s)
                ssd = again.speed(ssd.name, lambda: again.restore(prompt, tier="SSD"))
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _without_restart(bench: SpeedBench) -> tuple[list[Speed], Sequence[int]]:
    """Return what one process can measure, and the prompt that it restored, empty if none."""
    speeds = [bench.speed(f"prefill {n:,}", partial(bench.prefill, n)) for n in _PROMPT_TOKEN_COUNTS]
    for rows in _ROW_COUNTS:
        name = f"decode, {rows} row" + ("s" if rows > 1 else "")
        speeds.append(bench.speed(name, partial(bench.decode, rows)))
    prompt = bench.fresh_prompt(max(filter(bench.fits, _PROMPT_TOKEN_COUNTS), default=0))
    ram = Speed("restore from RAM", note="the model's context is too short")
    if prompt:
        ram = bench.speed(ram.name, lambda: bench.restore(prompt, tier="RAM"))
    return [*speeds, ram], prompt if ram.tokens_per_s is not None else ()


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


class _NotMeasuredError(Exception):
    """Says why something was not measured."""


class SpeedBench:
    """Measures one server within a time limit; failing calls raise, except for lateness.

    Each measurement uses prompts of new tokens, so that nothing of them is cached.
    """

    def __init__(self, client: Client, *, clock: Clock, limit_s: float) -> None:
        self._client = client
        self._clock = clock
        self._deadline_time = clock.monotonic() + limit_s
        [model, *_] = client.models()
        self.model_id = model.id
        self.device = model.device
        self._context_token_count = model.context_tokens
        self._alphabet = tuple({token.id: None for token in client.tokenize(_ALPHABET)})

    @property
    def left_s(self) -> float:
        return self._deadline_time - self._clock.monotonic()

    def fits(self, token_count: int) -> bool:
        """Whether the model's context holds a prompt of this length and its first token."""
        return token_count < self._context_token_count

    def fresh_prompt(self, token_count: int) -> Sequence[int]:
        """Return tokens of text in an order that was never used before."""
        nonce = uuid.uuid4().bytes
        digests = (hashlib.sha256(nonce + i.to_bytes(4, "big")).digest() for i in range(token_count))
        return tuple(self._alphabet[digest[0] % len(self._alphabet)] for digest in digests)

    def speed(self, name: str, measure: Callable[[], tuple[float, int, float]]) -> Speed:
        """Return what `measure` finds (tokens per second, tokens, seconds), or why it found nothing."""
        try:
            with err.status(name):
                return Speed(name, *measure())
        except _NotMeasuredError as error:
            return Speed(name, note=str(error))

    def prefill(self, token_count: int) -> tuple[float, int, float]:
        _, duration_s = self._first_token(self.fresh_prompt(token_count))
        return token_count / duration_s, token_count, duration_s

    def decode(self, row_count: int) -> tuple[float, int, float]:
        """Decode this many rows at once: the sum of their rates, each from its first token on."""
        prompts = [self.fresh_prompt(_DECODE_PROMPT_TOKEN_COUNT) for _ in range(row_count)]
        with ThreadPoolExecutor(row_count) as rows:
            found = list(rows.map(self._decoded, prompts))
        costs = [cost for cost in found if cost.decode_s > 0]
        rate = sum((cost.output_tokens - 1) / cost.decode_s for cost in costs)
        duration_s = max((cost.decode_s for cost in costs), default=0.0)
        return rate, sum(cost.output_tokens for cost in costs), duration_s

    def restore(self, prompt: Sequence[int], *, tier: str) -> tuple[float, int, float]:
        """Restore a prompt; unless it is to come from SSD, it is computed and cached first."""
        if tier == "RAM":
            self._first_token(prompt, "read_write")
        cost, duration_s = self._first_token(prompt, "read_write")
        restored = cost.ram_tokens if tier == "RAM" else cost.ssd_tokens
        if not restored:
            raise _NotMeasuredError(f"nothing of the prompt was in the {tier} tier")
        return restored / duration_s, restored, duration_s

    def _first_token(self, prompt: Sequence[int], use: CacheUse = "off") -> tuple[Usage, float]:
        began = self._clock.monotonic()
        usage = self._usage(prompt, {"max_output_tokens": 1, "cache_use": use})
        return usage, self._clock.monotonic() - began

    def _decoded(self, prompt: Sequence[int]) -> Usage:
        count = _DECODE_TOKEN_COUNT
        return self._usage(
            prompt, {"max_output_tokens": count, "ignore_end_tokens": True, "cache_use": "off"}
        )

    def _usage(self, prompt: Sequence[int], options: Options) -> Usage:
        if not self.fits(len(prompt)):
            raise _NotMeasuredError(f"the model's context is {self._context_token_count:,} tokens")
        late = _NotMeasuredError("no time was left; raise --limit-s")
        options["timeout_s"] = left_s = self.left_s
        if left_s <= 0:
            raise late
        try:
            return self._client.generate(prompt, **options).usage
        except IcehouseClientError as error:
            if error.code.name != "DEADLINE_EXCEEDED":
                raise
            raise late from error
