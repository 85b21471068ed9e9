"""`icehouse demo`: shows everything once, for people who just arrived.

Builds the model, starts `icehouse serve` as a separate process on a free loopback port, asks a question and
streams the answer as it is generated. Then it sends one long prompt three times: cold, again (from RAM), and
after stopping the server and starting another on the same cache directory (from SSD).

At the end it shows what the prompt cost from each tier, and whether the texts are the same.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import tempfile
from collections.abc import Sequence
from pathlib import Path

from icehouse_client import Client, Message, Options, Usage
from icehouse_client.cli.connection import failing_call_ends
from icehouse_client.cli.console import err, out, print_text, table
from icehouse_client.cli.generate import cost_text
from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from icehouse_server.bootstrap.imports.openblas import find_openblas, runs_on_cpu
from icehouse_server.cli.local.child_server import serving
from icehouse_server.cli.terminal.build_progress import build_progress
from icehouse_server.demo.build import ensure_demo_model
from icehouse_server.demo.models import SMOLLM2

_CALL_TIMEOUT_S = 300.0

_STORY_OUTPUT_TOKENS = 16
STORY_OPTIONS: Options = {
    "max_output_tokens": _STORY_OUTPUT_TOKENS,
    "temperature": 0.0,
    "stop": ("\n",),
    "timeout_s": _CALL_TIMEOUT_S,
}
_CPU_STORY_PARAGRAPHS = 3
_SLOW_STORY_PARAGRAPHS = 1
"""Paragraphs of the long prompt before its end, on a CPU and on one without a fast BLAS: about 640 and 330
tokens instead of 980, so that the first pass takes only seconds everywhere."""


def run_demo(*, question: str, max_output_tokens: int) -> bool:
    """Run the demo; return whether the long prompt got the same text from every tier.

    Raises IcehouseError if a part of it fails.
    """
    with build_progress() as on_progress:
        folder = ensure_demo_model(SMOLLM2, on_progress=on_progress)
    story = long_prompt()
    with tempfile.TemporaryDirectory(prefix="icehouse-demo-") as name:
        scratch = Path(name)
        with serving(f"starting a server for {folder.name}", scratch=scratch, model=SMOLLM2.name) as (
            client,
            address,
        ):
            err.print(f"[dim]serving {folder.name} at {address}[/]")
            with failing_call_ends(address):
                _show_answer(client, question, max_output_tokens=max_output_tokens)
                passes = [
                    _ask(client, story, name="cold", status="sending a long prompt, never seen before"),
                    _ask(client, story, name="from RAM", status="sending it again"),
                ]
        restarting = "starting another server on the same cache directory"
        with (
            serving(restarting, scratch=scratch, model=SMOLLM2.name) as (client, address),
            failing_call_ends(address),
        ):
            passes.append(_ask(client, story, name="from SSD", status="sending it once more"))
    _show_comparison(story, passes)
    err.print("[dim]the server has stopped; start your own with[/] icehouse serve")
    return texts_are_equal(passes)


def long_prompt() -> str:
    """Return the story that ships with the demo.

    It ends in the middle of a sentence that it has said several times. The model is sure of what follows, so
    that rounding, which depends on the number of tokens computed at once, changes no word.
    """
    text = importlib.resources.files("icehouse_server.demo").joinpath("story.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    if runs_on_cpu():
        count = _SLOW_STORY_PARAGRAPHS if find_openblas() is None else _CPU_STORY_PARAGRAPHS
        paragraphs = [*paragraphs[:count], paragraphs[-1]]
    return "\n\n".join(paragraphs)


def _show_answer(client: Client, question: str, *, max_output_tokens: int) -> None:
    out.print()
    out.print(question, style="bold", markup=False)
    options: Options = {"max_output_tokens": max_output_tokens, "timeout_s": _CALL_TIMEOUT_S}
    with client.stream([Message(role="user", content=question)], **options) as stream:
        for text in stream:
            print_text(text)
    out.print("\n")
    out.print(cost_text(stream.reply.usage, stream.reply.finish_reason), style="green")
    out.print()


def _ask(client: Client, prompt: str, *, name: str, status: str) -> DemoCall:
    with err.status(status):
        reply = client.generate(prompt, **STORY_OPTIONS)
    return DemoCall(name, reply.text, reply.usage)


def _show_comparison(prompt: str, passes: list[DemoCall]) -> None:
    out.print(f"A long prompt ({passes[0].usage.prompt_tokens:,} tokens), three times:\n")
    last_words = prompt.rpartition(". ")[2]
    for text in dict.fromkeys(each.text for each in passes):
        out.print("… " + last_words, style="bold", end="", markup=False)
        out.print(text, markup=False)
    out.print()
    out.print(comparison_table(passes))
    out.print()
    out.print(verdict_text(passes))


_BAR_WIDTH = 20
"""Columns of the longest bar; 80 columns are enough for it and the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class DemoCall:
    """One call: its name for people, its text, and what it cost."""

    name: str
    text: str
    usage: Usage


def texts_are_equal(passes: Sequence[DemoCall]) -> bool:
    """Whether all passes gave the same text, and it is not empty."""
    return len({each.text for each in passes}) == 1 and passes[0].text != ""


def comparison_table(passes: Sequence[DemoCall]) -> Table:
    """Return a row per pass, with a bar as long as its time to first token."""
    longest_s = max(each.usage.ttft_s for each in passes)
    figures = ("first token", "reused")
    shown = table("the same prompt", *figures, "", figures=figures)
    for each in passes:
        bar = Bar(longest_s, 0, each.usage.ttft_s, width=_BAR_WIDTH, color="cyan")
        shown.add_row(each.name, f"{each.usage.ttft_s * 1000:,.0f} ms", _reused_text(each.usage), bar)
    return shown


def verdict_text(passes: Sequence[DemoCall]) -> Text:
    """Return one line: how much sooner the later passes began, and whether all texts are equal."""
    if not texts_are_equal(passes):
        return Text("the texts differ, which is a bug: please report it", style="bold red")
    cold, *others = passes
    speeds = [f"{each.name} {_times_sooner(cold, each)}" for each in others]
    return Text(f"the {len(passes)} texts are equal; {', '.join(speeds)}", style="green")


def _times_sooner(cold: DemoCall, warm: DemoCall) -> str:
    if warm.usage.ttft_s <= 0:
        return "at once"
    times = cold.usage.ttft_s / warm.usage.ttft_s
    return f"{times:.0f} × sooner" if times >= 10 else f"{times:.1f} × sooner"


def _reused_text(usage: Usage) -> str:
    tiers = [(usage.ram_tokens, "RAM"), (usage.ssd_tokens, "SSD")]
    parts = [f"{count:,} {tier}" for count, tier in tiers if count]
    return f"{' + '.join(parts) or 0} of {usage.prompt_tokens:,}"
