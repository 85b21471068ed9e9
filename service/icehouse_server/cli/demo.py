"""`icehouse demo`: the whole thing once, for people who just arrived.

Makes the model, starts `icehouse serve` as a process of its own on a free loopback port, asks it a question
and streams the answer as it is generated, then sends one long prompt three times: cold, again (from RAM),
and after the server was stopped and started on the same cache directory (from SSD).

One prompt served from each tier: what it cost, and whether the texts are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from icehouse_server.bootstrap.preload import find_openblas, runs_on_cpu
from icehouse_server.cli.client.generate import print_text
from icehouse_server.cli.terminal.console import build_progress, err, out
from icehouse_server.demo.build import ensure_demo_model
from icehouse_server.demo.models import SMOLLM2
from icehouse_server.errors import EngineFailed, Reason, StartError
from icehouse_server.rpc.client.generate import CallFailed, Connection, Prompt, Summary

_STOP_TIMEOUT_S = 60.0
"""The server's own grace is shorter; past this it is stuck and is killed."""

_CALL_TIMEOUT_S = 300.0

_STORY_OUTPUT_TOKENS = 16
_CPU_STORY_PARAGRAPHS = 3
_SLOW_STORY_PARAGRAPHS = 1
"""Of the long prompt before its end, on a CPU and where nothing fast multiplies matrices there: about 640
and 330 tokens instead of 980, so that the first pass takes seconds everywhere."""


def run_demo(*, question: str, max_output_tokens: int) -> bool:
    """Run the demo; return whether the long prompt got the same text from every tier.

    Raises IcehouseError when a part of it does not work.
    """
    with build_progress() as on_progress:
        folder = ensure_demo_model(SMOLLM2, on_progress=on_progress)
    story = Prompt(text=long_prompt(), max_output_tokens=_STORY_OUTPUT_TOKENS, temperature=0.0, stop=("\n",))
    with tempfile.TemporaryDirectory(prefix="icehouse-demo-") as name:
        scratch = Path(name)
        with _serving(f"starting a server for {folder.name}", scratch=scratch) as connection:
            err.print(f"[dim]serving {folder.name} at {connection.address}[/]")
            _show_answer(connection, Prompt(text=question, is_chat=True, max_output_tokens=max_output_tokens))
            passes = [
                _ask(connection, story, name="cold", status="sending a long prompt, never seen before"),
                _ask(connection, story, name="from RAM", status="sending it again"),
            ]
        with _serving("starting another server on the same cache directory", scratch=scratch) as connection:
            passes.append(_ask(connection, story, name="from SSD", status="sending it once more"))
    _show_comparison(story.text, passes)
    err.print("[dim]the server has stopped; start your own with[/] icehouse serve")
    return texts_are_equal(passes)


def long_prompt() -> str:
    """Return the story that ships with the demo.

    It ends in the middle of a sentence that it has said several times. The model is sure of what
    follows, so that rounding, which differs with the number of tokens computed at once, changes no word.
    """
    text = importlib.resources.files("icehouse_server.demo").joinpath("story.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    if runs_on_cpu():
        count = _SLOW_STORY_PARAGRAPHS if find_openblas() is None else _CPU_STORY_PARAGRAPHS
        paragraphs = [*paragraphs[:count], paragraphs[-1]]
    return "\n\n".join(paragraphs)


@contextlib.contextmanager
def _serving(status: str, *, scratch: Path) -> Iterator[Connection]:
    """Run a server and yield a connection to it once it serves; stop it in order at the end."""
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stopping, contextlib.ExitStack() as stack:
        with err.status(status):
            server = stack.enter_context(running_server(address=address, scratch=scratch))
            connection = stack.enter_context(Connection(address))
            is_serving = connection.wait_until_serving(is_alive=lambda: server.poll() is None)
        if not is_serving:
            # Closing reports the server's code and log; what is left is code 0 without having served.
            stack.close()
            raise StartError(Reason.ENGINE_FAILED, "the server ended before it served")
        yield connection
        stopping.enter_context(err.status("stopping the server, which first writes its blocks to SSD"))


def _show_answer(connection: Connection, prompt: Prompt) -> None:
    out.print()
    out.print(prompt.text, style="bold", markup=False)
    with _failure_explained():
        summary = connection.stream(prompt, on_text=print_text, timeout_s=_CALL_TIMEOUT_S)
    out.print("\n")
    out.print(summary_text(summary), style="green")
    out.print()


def _ask(connection: Connection, prompt: Prompt, *, name: str, status: str) -> Pass:
    pieces: list[str] = []
    with err.status(status), _failure_explained():
        summary = connection.stream(prompt, on_text=pieces.append, timeout_s=_CALL_TIMEOUT_S)
    return Pass(name, "".join(pieces), summary)


@contextlib.contextmanager
def _failure_explained() -> Iterator[None]:
    try:
        yield
    except CallFailed as error:
        raise EngineFailed(Reason.ENGINE_FAILED, f"the demo's call failed: {error}") from error


def _show_comparison(prompt: str, passes: list[Pass]) -> None:
    out.print(f"A long prompt ({passes[0].summary.prompt_token_count:,} tokens), three times:\n")
    last_words = prompt.rpartition(". ")[2]
    for text in dict.fromkeys(each.text for each in passes):
        out.print("… " + last_words, style="bold", end="", markup=False)
        out.print(text, markup=False)
    out.print()
    out.print(comparison_table(passes))
    out.print()
    out.print(verdict_text(passes))


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(
    *, address: str, scratch: Path, model: str = SMOLLM2.name, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `icehouse serve` with a demo model at `address`, with its blocks in `scratch`; at the end stop it.

    Raises StartError with the server's log when it did not end with code 0.
    """
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "icehouse_server.cli.main", "serve", "--model", model, "--uds", ""]
    command += ["--host", host, "--port", port, "--cache-directory", str(scratch / "blocks")]
    # What is shown must not depend on the settings that somebody happens to have in the environment.
    command += ["--cache", "--ssd", "--spill-policy", "on_evict", *options]
    log_file = scratch / "server.log"
    with log_file.open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the server in order.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            yield server
        finally:
            _stop(server)
    if server.returncode != 0:
        out.print(log_file.read_text(encoding="utf-8", errors="replace"), markup=False, style="dim")
        raise StartError(
            Reason.ENGINE_FAILED, f"the server ended with code {server.returncode}; its log stands above"
        )


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


_BAR_WIDTH = 20
"""Columns of the longest bar; with the other columns 80 are enough."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One call: how it is named to people, what it said, and what it cost."""

    name: str
    text: str
    summary: Summary


def texts_are_equal(passes: Sequence[Pass]) -> bool:
    """Whether every pass said the same, and said something."""
    return len({each.text for each in passes}) == 1 and passes[0].text != ""


def comparison_table(passes: Sequence[Pass]) -> Table:
    """Return a row for each pass, with a bar as long as its time to first token."""
    longest_s = max(each.summary.ttft_s for each in passes)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("the same prompt", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("reused", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in passes:
        bar = Bar(longest_s, 0, each.summary.ttft_s, width=_BAR_WIDTH, color="cyan")
        table.add_row(each.name, f"{each.summary.ttft_s * 1000:,.0f} ms", _reused_text(each.summary), bar)
    return table


def verdict_text(passes: Sequence[Pass]) -> Text:
    """Return one line: how much sooner the later passes began, and whether all said the same."""
    if not texts_are_equal(passes):
        return Text("the texts differ, and they must not: please report this", style="bold red")
    cold, *others = passes
    speeds = [f"{each.name} {_times_sooner(cold, each)}" for each in others]
    return Text(f"the {len(passes)} texts are equal; {', '.join(speeds)}", style="green")


def _times_sooner(cold: Pass, warm: Pass) -> str:
    if warm.summary.ttft_s <= 0:
        return "at once"
    times = cold.summary.ttft_s / warm.summary.ttft_s
    return f"{times:.0f} × sooner" if times >= 10 else f"{times:.1f} × sooner"


def summary_text(summary: Summary) -> str:
    """Return a call's cost in one line."""
    reused = summary.ram_token_count + summary.ssd_token_count
    where = f" ({summary.ram_token_count} from RAM, {summary.ssd_token_count} from SSD)" if reused else ""
    return (
        f"{summary.prompt_token_count} prompt tokens, {reused} reused{where} · "
        f"first token after {summary.ttft_s * 1000:.0f} ms · "
        f"{summary.output_token_count} tokens at {summary.decode_tokens_per_s:.1f}/s · "
        f"{summary.finish_reason.replace('_', ' ')}"
    )


def _reused_text(summary: Summary) -> str:
    tiers = [(summary.ram_token_count, "RAM"), (summary.ssd_token_count, "SSD")]
    parts = [f"{count:,} {tier}" for count, tier in tiers if count]
    return f"{' + '.join(parts) or 0} of {summary.prompt_token_count:,}"
