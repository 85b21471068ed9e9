"""Screen of a chat: an answer as it comes, what it cost, and notes beside it.

Answers go to standard output, all else to standard error; on a terminal reasoning is shown, dimmed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from rich.markup import escape
from rich.status import Status
from rich.table import Table

from icehouse_client.cli.chat.turns import HELP, QUOTES
from icehouse_client.cli.console import err, harmless, out, print_json
from icehouse_client.cli.generate import cost_text, reply_facts
from icehouse_client.results import Reply
from icehouse_client.stream_sum import StreamEvent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Shows a conversation, as much as whoever looks at it wants."""

    is_terminal: bool
    is_json: bool = False
    is_quiet: bool = False

    def greet(self, model: str, context_tokens: int) -> None:
        """Say with whom one talks."""
        if self.is_terminal and not self.is_quiet:
            err.print(
                f"[dim]{escape(model)}, {context_tokens:,} tokens of context · /help lists commands, "
                f"{QUOTES} begins and ends several lines, Ctrl-D ends[/]"
            )

    def help(self) -> None:
        """List the commands."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for said, does in HELP.values():
            table.add_row(said, does)
        table.add_row(QUOTES, "begins and ends a turn of several lines")
        err.print(table)

    def note(self, text: str) -> None:
        """Say what was done, to people."""
        if self.is_terminal:
            err.print(text, style="dim", markup=False)

    @contextlib.contextmanager
    def answer(self) -> Iterator[AnswerView]:
        """Show what comes until the block ends."""
        view = AnswerView(self)
        try:
            yield view
        finally:
            view.close()

    def finish(self, reply: Reply) -> None:
        """Show what an answer cost; with `--json` the whole of it."""
        if self.is_json:
            print_json(reply_facts(reply), indent=None)
        elif not self.is_quiet:
            err.print(cost_text(reply.usage, reply.finish_reason), style="dim", markup=False)


class AnswerView:
    """One answer on its way."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._has_written = False
        self._is_reasoning = False
        self._status: Status | None = None
        if screen.is_terminal:
            self._status = err.status("reading the prompt")
            self._status.start()

    def take(self, event: StreamEvent) -> None:
        """Show what an event brings."""
        if event.HasField("prefill_progress") and self._status is not None:
            done = event.prefill_progress
            words = f"reading the prompt: {done.processed_tokens:,} of {done.prompt_tokens:,} tokens"
            self._status.update(words)
        elif event.HasField("delta"):
            if event.delta.reasoning and self._screen.is_terminal:
                self._write(event.delta.reasoning, is_reasoning=True)
            if event.delta.text and not self._screen.is_json:
                self._write(event.delta.text, is_reasoning=False)

    def close(self) -> None:
        """End the answer's last line."""
        self._end_status()
        if self._has_written:
            print(flush=True)

    def _write(self, text: str, *, is_reasoning: bool) -> None:
        self._end_status()
        if self._is_reasoning and not is_reasoning:
            print(flush=True)
        self._is_reasoning = is_reasoning
        self._has_written = True
        if is_reasoning:
            out.print(harmless(text), style="dim", end="", markup=False)
        else:
            print(harmless(text) if self._screen.is_terminal else text, end="", flush=True)

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
