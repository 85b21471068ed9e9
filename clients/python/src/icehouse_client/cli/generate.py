"""`icehouse generate`: ask a running server for a continuation and print it as it comes, then its cost.

What an answer may be asked for and what it cost is alike for every command that has one.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Self

import typer
from icehouse.v1.model_service_pb2 import LoadingModel
from rich.markup import escape
from rich.status import Status

from icehouse_client.cli.connection import Server, server_of
from icehouse_client.cli.console import AsJson, err, facts_of, print_json, print_text, printable
from icehouse_client.cli.figures import duration_text
from icehouse_client.cli.option_groups import count, said, timeout, with_groups
from icehouse_client.cli.prompt import GivenPrompt, Suffix, prompt_of
from icehouse_client.requests import Options
from icehouse_client.results import Reply, Usage, seconds
from icehouse_client.stream_sum import StreamEvent


def answer_options_of(
    max_output_tokens: Annotated[
        int | None, count(min=1, help="Maximum tokens to generate; by default the server's choice.")
    ] = None,
    max_reasoning_tokens: Annotated[
        int | None, count(min=0, help="Maximum thinking tokens before a chat's answer; 0 answers at once.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature; 0, the default, is greedy.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens that together have this probability."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be repeated.")] = None,
    timeout_s: Annotated[float | None, timeout()] = None,
) -> Options:
    """Return how long an answer may be and how its tokens are drawn, as the client takes it."""
    length: Options = said(max_output_tokens=max_output_tokens, max_reasoning_tokens=max_reasoning_tokens)
    drawing: Options = said(temperature=temperature, top_p=top_p, seed=seed, stop=stop, timeout_s=timeout_s)
    return {**length, **drawing}


@with_groups(server=server_of, prompt=prompt_of, answer=answer_options_of)
def generate(
    prompt: GivenPrompt,
    server: Server,
    answer: Options,
    suffix: Suffix = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stream a continuation of TEXT from a running server."""
    options: Options = {**answer, **prompt.options}
    stream = server.client.stream(prompt.read(suffix), **options)
    with stream, Waiting(is_shown=err.is_terminal) as waiting:
        for event in stream.events():
            waiting.take(event)
            if event.delta.text and not (event.delta.completion_index or as_json):
                print_text(event.delta.text)
    if as_json:
        print_json(reply_facts(stream.reply))
        return
    print(flush=True)
    if not quiet:
        err.print(reply_cost_text(stream.reply), style="dim", markup=False)


class Waiting:
    """What an answer waits for, on a terminal until its first tokens come. Used with `with`."""

    def __init__(self, *, is_shown: bool) -> None:
        self._status: Status | None = err.status("reading the prompt") if is_shown else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.end()

    def take(self, event: StreamEvent) -> None:
        """Show what an event says of it; the first delta ends it."""
        if self._status is None:
            return
        if event.HasField("loading_model"):
            self._status.update(loading_text(event.loading_model))
        elif event.HasField("started"):
            self._status.update("reading the prompt")
        elif event.HasField("prefill_progress"):
            done = event.prefill_progress
            self._status.update(
                f"reading the prompt: {done.processed_tokens:,} of {done.prompt_tokens:,} tokens"
            )
        elif event.HasField("delta"):
            self.end()

    def end(self) -> None:
        """Take it off the screen."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def loading_text(loading: LoadingModel) -> str:
    """Return how far a model is that is being loaded, in one line."""
    state = facts_of(loading)["state"].removeprefix("MODEL_STATE_")
    words = {"FETCHING": "fetching", "LOADING": "loading"}.get(state, "waiting to load")
    return f"{words} {escape(printable(loading.model))}, {duration_text(seconds(loading.elapsed))} so far"


def reply_cost_text(reply: Reply) -> str:
    """Return what an answer cost, in one line, with the time that its model took to load."""
    loaded = f"model loaded in {duration_text(reply.load_s)} · " if reply.load_s else ""
    return loaded + cost_text(reply.usage, reply.finish_reason)


def cost_text(usage: Usage, finish_reason: str) -> str:
    """Return the cost of a call in one line: what was reused and from where, how long it took, how fast."""
    tiers = ((usage.ram_tokens, "RAM"), (usage.ssd_tokens, "SSD"))
    told = ", ".join(f"{count:,} from {tier}" for count, tier in tiers if count)
    reused = f"{usage.ram_tokens + usage.ssd_tokens:,} cached" + (f" ({told})" if told else "")
    parts = [f"{usage.prompt_tokens:,} prompt tokens, {reused}"]
    if usage.output_tokens:
        parts.append(f"first token after {duration_text(usage.ttft_s)}")
        rate = (usage.output_tokens - 1) / usage.decode_s if usage.decode_s > 0 else 0.0
        parts.append(f"{usage.output_tokens:,} tokens at {rate:.1f}/s")
    else:
        parts.append(f"{duration_text(usage.total_s)} in all")
    return " · ".join((*parts, finish_reason.replace("_", " ").lower()))


def reply_facts(reply: Reply) -> dict[str, object]:
    """Return an answer for JSON."""
    names = ("request_id", "model", "text", "reasoning", "finish_reason", "reuse_limit", "seed", "load_s")
    return {name: getattr(reply, name) for name in names} | {"usage": dataclasses.asdict(reply.usage)}
