"""`icehouse bench`: how fast this machine prefills, decodes and restores, by a running server or its own."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    speeds, prompt = _without_restart(bench)
    if prompt is not None:
        client.cache.evict(prompt, timeout_s=_EVICT_TIMEOUT_S)
    ssd = Speed("restore from SSD", note="needs a restart, so a server of its own: icehouse bench MODEL")
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _of_own(model: str, *, limit_s: float) -> Report:
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        first = serving(f"starting a server for {model}", scratch=Path(name), model=model)
        with first as (client, address), failing_call_ends(address):
            deadline_time = _CLOCK.monotonic() + limit_s
            bench = SpeedBench(client, clock=_CLOCK, deadline_time=deadline_time)
            speeds, prompt = _without_restart(bench)
            # The restart is no part of what is measured, nor of its time.
            left_s = deadline_time - _CLOCK.monotonic()
        if prompt is None:
            ssd = Speed("restore from SSD", note=speeds[-1].note)
        else:
            restarting = "starting another server on the same cache directory"
            second = serving(restarting, scratch=Path(name), model=model)
            with second as (client, address), failing_call_ends(address), err.status("restore from SSD"):
                again = SpeedBench(client, clock=_CLOCK, deadline_time=_CLOCK.monotonic() + left_s)
                ssd = again.restore(prompt, tier="SSD")
    return Report(bench.model_id, bench.device, (*speeds, ssd))


def _without_restart(bench: SpeedBench) -> tuple[list[Speed], tuple[int, ...] | None]:
    """Return what one process can measure, and the prompt that it restored."""
    speeds = []
    for token_count in PROMPT_TOKEN_COUNTS:
        with err.status(f"prefill of {token_count:,} tokens"):
            speeds.append(bench.prefill(token_count))
    for row_count in ROW_COUNTS:
        with err.status(f"decode of {row_count} at once"):
            speeds.append(bench.decode(row_count))
    fitting = [count for count in PROMPT_TOKEN_COUNTS if bench.fits(count)]
    with err.status("restore from RAM"):
        prompt = bench.cache_prompt(fitting[-1]) if fitting else None
        if prompt is None:
            speeds.append(Speed("restore from RAM", note="no prompt could be cached in the time left"))
        else:
            speeds.append(bench.restore(prompt, tier="RAM"))
    return speeds, prompt if speeds[-1].tokens_per_s is not None else None


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


PROMPT_TOKEN_COUNTS = (512, 2048)
ROW_COUNTS = (1, 8)
_DECODE_TOKEN_COUNT = 64
_DECODE_PROMPT_TOKEN_COUNT = 16
_ALPHABET = "The quick brown fox jumps over the lazy dog, and then what happens to the dog? Nobody knows. "


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """One measurement. Without a rate `note` says why there is none."""

    name: str
    tokens_per_s: float | None = None
    token_count: int = 0
    duration_s: float = 0.0
    note: str = ""


class SpeedBench:
    """Measures one server until a deadline (`Clock.monotonic`); a call that fails raises but for lateness.

    Prompts are new tokens for each measurement, so that nothing of them is cached. What does not fit into the
    time left is reported as not measured.
    """

    def __init__(self, client: Client, *, clock: Clock, deadline_time: float) -> None:
        self._client = client
        self._clock = clock
        self._deadline_time = deadline_time
        [model, *_] = client.models()
        self.model_id = model.id
        self.device = model.device
        self._context_token_count = model.context_tokens
        self._alphabet = tuple({token.id: None for token in client.tokenize(_ALPHABET)})

    def fresh_prompt(self, token_count: int) -> tuple[int, ...]:
        """Return tokens of text in an order that nobody has asked for before."""
        nonce = uuid.uuid4().bytes
        digests = (hashlib.sha256(nonce + i.to_bytes(4, "big")).digest() for i in range(token_count))
        return tuple(self._alphabet[digest[0] % len(self._alphabet)] for digest in digests)

    def prefill(self, token_count: int) -> Speed:
        prompt = self.fresh_prompt(token_count)
        return self._timed(f"prefill {token_count:,}", token_count, lambda: self._first_token(prompt))

    def decode(self, row_count: int) -> Speed:
        """Decode so many rows at once: the sum of their rates, from each one's first token on."""
        name = f"decode, {row_count} row" + ("s" if row_count > 1 else "")
        if self._left_s <= 0:
            return _late(name)
        prompts = [self.fresh_prompt(_DECODE_PROMPT_TOKEN_COUNT) for _ in range(row_count)]
        try:
            with ThreadPoolExecutor(row_count) as rows:
                found = list(rows.map(self._decoded, prompts))
        except IcehouseClientError as error:
            return _unless_late(name, error)
        costs = [cost for cost in found if cost.decode_s > 0]
        rate = sum((cost.output_tokens - 1) / cost.decode_s for cost in costs)
        duration_s = max((cost.decode_s for cost in costs), default=0.0)
        return Speed(name, rate, sum(cost.output_tokens for cost in costs), duration_s)

    def restore(self, prompt: Sequence[int], *, tier: str) -> Speed:
        name = f"restore from {tier}"
        cost: list[Usage] = []
        speed = self._timed(name, len(prompt), lambda: cost.append(self._first_token(prompt, "read_write")))
        if not cost:
            return speed
        restored = cost[0].ram_tokens if tier == "RAM" else cost[0].ssd_tokens
        if not restored:
            return Speed(name, note=f"nothing of the prompt was in the {tier} tier")
        return dataclasses.replace(speed, token_count=restored, tokens_per_s=restored / speed.duration_s)

    def cache_prompt(self, token_count: int) -> tuple[int, ...] | None:
        """Have a new prompt computed and cached; None where it does not fit or there is no time left."""
        if not self.fits(token_count) or self._left_s <= 0:
            return None
        prompt = self.fresh_prompt(token_count)
        try:
            self._first_token(prompt, "read_write")
        except IcehouseClientError as error:
            _unless_late("restore", error)
            return None
        return prompt

    def fits(self, token_count: int) -> bool:
        """Whether the model's context holds such a prompt and its first token."""
        return token_count < self._context_token_count

    @property
    def _left_s(self) -> float:
        return self._deadline_time - self._clock.monotonic()

    def _timed(self, name: str, token_count: int, measure: Callable[[], object]) -> Speed:
        if not self.fits(token_count):
            return Speed(name, note=f"the model's context is {self._context_token_count:,} tokens")
        if self._left_s <= 0:
            return _late(name)
        began = self._clock.monotonic()
        try:
            measure()
        except IcehouseClientError as error:
            return _unless_late(name, error)
        duration_s = self._clock.monotonic() - began
        return Speed(name, token_count / duration_s, token_count, duration_s)

    def _first_token(self, prompt: Sequence[int], use: CacheUse = "off") -> Usage:
        options: Options = {"max_output_tokens": 1, "cache_use": use, "timeout_s": max(0.001, self._left_s)}
        return self._client.generate(prompt, **options).usage

    def _decoded(self, prompt: Sequence[int]) -> Usage:
        options: Options = {
            "max_output_tokens": _DECODE_TOKEN_COUNT,
            "ignore_end_tokens": True,
            "cache_use": "off",
            "timeout_s": max(0.001, self._left_s),
        }
        return self._client.generate(prompt, **options).usage


def _late(name: str) -> Speed:
    return Speed(name, note="no time was left; allow more with --limit-s")


def _unless_late(name: str, error: IcehouseClientError) -> Speed:
    if error.code.name != "DEADLINE_EXCEEDED":
        raise error
    return _late(name)
