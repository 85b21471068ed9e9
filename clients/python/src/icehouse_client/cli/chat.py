"""`icehouse chat`: talk with a served model, on a terminal or through a pipe, each turn from the cache.

Answers go to standard output, all else to standard error; on a terminal reasoning is shown, dimmed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.markup import escape

from icehouse_client.cli.connection import Server, failure_text, server_of
from icehouse_client.cli.console import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    AsJson,
    UsageError,
    complain,
    err,
    expanded,
    facts_table,
    harmless,
    out,
    print_json,
)
from icehouse_client.cli.generate import Waiting, answer_options_of, reply_cost_text, reply_facts
from icehouse_client.cli.option_groups import said, with_groups
from icehouse_client.cli.prompt import Adapter, Model, read_conversation
from icehouse_client.conversation import Conversation
from icehouse_client.errors import IcehouseClientError
from icehouse_client.requests import Options
from icehouse_client.results import Reply
from icehouse_client.stream_sum import StreamEvent

QUOTES = '"""'
HELP = {
    "help": ("/help", "this"),
    "system": ("/system TEXT", "changes the system prompt; without TEXT shows it"),
    "undo": ("/undo", "removes the last turn"),
    "clear": ("/clear", "removes all turns, but keeps the system prompt"),
    "save": ("/save FILE", "writes the conversation, with its tokens, to a file"),
    "load": ("/load FILE", "continues the conversation in a file"),
    "exit": ("/exit", "ends, as Ctrl-D does"),
}
"""What a user may ask of the chat itself: how it is said, and what it does."""

System = Annotated[str, typer.Option(help="System prompt.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the answers.")]


@with_groups(server=server_of, answer=answer_options_of)
def chat(
    server: Server,
    answer: Options,
    system: System = "",
    load: Annotated[Path | None, typer.Option(help="Continue a saved conversation.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save the conversation to this file after each turn.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            help="Turn thinking on or off, for models that can think; by default the template's choice."
        ),
    ] = None,
    model: Model = "",
    adapter: Adapter = "",
    tenant: Annotated[str, typer.Option(help="Tenant to act for; operators only.", show_default=False)] = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Chat with a model. Each line is a turn, also from a pipe; triple quotes begin and end several lines.

    Below each answer is how many of its prompt's tokens came from the cache. /help lists commands.
    """
    talk = Conversation() if load is None else read_conversation(load)
    talk.system = system or talk.system
    named: Options = said(model=model, adapter=adapter, tenant=tenant)
    if thinking is not None:
        named["template_arguments"] = {"enable_thinking": thinking}
    converse(server, talk, {**answer, **named}, as_json=as_json, is_quiet=quiet, save_to=save)


def converse(
    server: Server,
    talk: Conversation,
    options: Options,
    *,
    as_json: bool,
    is_quiet: bool,
    save_to: Path | None = None,
) -> None:
    """Go on with a conversation on the terminal, or through a pipe, until its end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(is_terminal=is_terminal, is_json=as_json, is_quiet=is_quiet)
    served = server.client.models()
    named = [model for model in served if options.get("model") in (model.id, *model.aliases)]
    [model, *_] = named or served
    screen.greet(model.id, model.context_tokens)
    session = ChatSession(server, talk, options, screen, save_to)
    session.run(TurnReader(sys.stdin, is_terminal=is_terminal))


@dataclasses.dataclass(slots=True)
class ChatSession:
    """One conversation. Without a terminal the first thing that fails ends it, with an exit code."""

    server: Server
    talk: Conversation
    options: Options
    screen: Screen
    save_to: Path | None

    def run(self, turns: Iterable[Turn]) -> None:
        """Go through the turns until they end or a command ends them."""
        for turn in turns:
            if isinstance(turn, Command):
                if turn.verb == "exit":
                    return
                self._obey(turn)
            elif turn:
                self._ask(turn)

    def _ask(self, text: str) -> None:
        self.talk.say(text)
        try:
            options: Options = {**self.options, "session_id": self.talk.session_id}
            stream = self.server.client.stream(self.talk, **options)
            with stream, contextlib.closing(AnswerView(self.screen)) as answer:
                for event in stream.events():
                    answer.take(event)
            reply = stream.reply
        except IcehouseClientError as error:
            self.talk.undo()
            is_long = error.reason == "PROMPT_TOO_LONG"
            hint = "; /undo removes the last turn, /clear all of them" if is_long else ""
            self._fail(failure_text(error, self.server.address) + hint, EXIT_FAILURE)
        except KeyboardInterrupt:
            self.talk.undo()
            self._fail("interrupted; the turn is not kept", EXIT_INTERRUPTED)
        else:
            self.talk.add(reply)
            self.screen.finish(reply)
            if self.save_to is not None:
                self._save(self.save_to)

    def _obey(self, command: Command) -> None:
        match command.verb:
            case "help":
                self.screen.help()
            case "undo":
                self.talk.undo()
                self.screen.note(f"{len(self.talk)} messages are left")
            case "clear":
                self.talk = Conversation(system=self.talk.system)
                self.screen.note("forgotten")
            case "system":
                self.talk.system = command.argument or self.talk.system
                self.screen.note(f"system prompt: {self.talk.system or 'none'}")
            case "save" if path := command.argument or self.save_to:
                self._save(Path(path))
            case "load" if command.argument:
                self._load(Path(command.argument))
            case None:
                hint = '/help lists the commands, """ around a turn sends it as is'
                self._fail(f"there is no /{command.word}; {hint}", EXIT_USAGE)
            case _:
                self._fail(f"/{command.word} needs a file name", EXIT_USAGE)

    def _save(self, path: Path) -> None:
        try:
            write_conversation(expanded(path), self.talk)
        except OSError as error:
            self._fail(f"{path} cannot be written ({error.strerror}); name another file", EXIT_FAILURE)
        else:
            self.screen.note(f"saved to {path}")

    def _load(self, path: Path) -> None:
        try:
            self.talk = read_conversation(path)
        except UsageError as error:
            self._fail(str(error), EXIT_USAGE)
        else:
            self.screen.note(f"{len(self.talk)} messages from {path}")

    def _fail(self, message: str, code: int) -> None:
        complain(message)
        if not self.screen.is_terminal:
            raise typer.Exit(code)


def write_conversation(path: Path, talk: Conversation) -> None:
    """Write a conversation whole or not at all, to be read by its owner only."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{talk.to_json()}\n")
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A line that began with a slash; `verb` is a key of HELP, None where there is no such command."""

    verb: str | None
    argument: str
    word: str


Turn = str | Command


class TurnReader:
    """Reads turns until the input ends. On a terminal lines can be edited, and earlier ones called back."""

    def __init__(self, source: TextIO, *, is_terminal: bool) -> None:
        self._source = source
        self._is_terminal = is_terminal
        if is_terminal:
            with contextlib.suppress(ImportError):
                # What `input` then edits lines with; kept in memory only, for they are prompts.
                import readline  # noqa: F401

    def __iter__(self) -> Iterator[Turn]:
        while (line := self._line("> ")) is not None:
            stripped = line.strip()
            if stripped.startswith(QUOTES):
                yield self._quoted(stripped.removeprefix(QUOTES))
            elif stripped.startswith("/"):
                yield command_of(stripped)
            elif stripped:
                yield line

    def _quoted(self, first: str) -> str:
        """Return what stands between triple quotes; the end of the input ends it too."""
        lines: list[str] = []
        line: str | None = first
        while line is not None:
            if line.rstrip().endswith(QUOTES):
                lines.append(line.rstrip().removesuffix(QUOTES))
                break
            lines.append(line)
            line = self._line("… ")
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return the next line; None at the end. Ctrl-C on a terminal empties the line."""
        if not self._is_terminal:
            line = self._source.readline()
            return line.removesuffix("\n") if line else None
        while True:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)


def command_of(line: str) -> Command:
    """Return the command that a line with a slash is."""
    word, _, argument = line.removeprefix("/").partition(" ")
    names = {"bye": "exit", "quit": "exit", "?": "help", **{verb: verb for verb in HELP}}
    return Command(names.get(word.lower()), argument.strip(), word)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Shows a conversation, as much as whoever looks at it wants."""

    is_terminal: bool
    is_json: bool = False
    is_quiet: bool = False

    def greet(self, model: str, context_tokens: int) -> None:
        """Say with whom one talks; of a model that was never loaded the context is not known."""
        if self.is_terminal and not self.is_quiet:
            context = f"{context_tokens:,} tokens of context" if context_tokens else "not loaded yet"
            err.print(
                f"[dim]{escape(model)}, {context} · /help lists commands, "
                f"{QUOTES} begins and ends several lines, Ctrl-D ends[/]"
            )

    def help(self) -> None:
        """List the commands."""
        err.print(facts_table(*HELP.values(), (QUOTES, "begins and ends a turn of several lines"), style=""))

    def note(self, text: str) -> None:
        """Say what was done, to people."""
        if self.is_terminal:
            err.print(text, style="dim", markup=False)

    def finish(self, reply: Reply) -> None:
        """Show what an answer cost; with `--json` the whole of it."""
        if self.is_json:
            print_json(reply_facts(reply), indent=None)
        elif not self.is_quiet:
            err.print(reply_cost_text(reply), style="dim", markup=False)


class AnswerView:
    """One answer on its way."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._has_written = False
        self._is_reasoning = False
        self._waiting = Waiting(is_shown=screen.is_terminal).__enter__()

    def take(self, event: StreamEvent) -> None:
        """Show what an event brings."""
        self._waiting.take(event)
        if event.HasField("delta"):
            if event.delta.reasoning and self._screen.is_terminal:
                self._write(event.delta.reasoning, is_reasoning=True)
            if event.delta.text and not self._screen.is_json:
                self._write(event.delta.text, is_reasoning=False)

    def close(self) -> None:
        """End the answer's last line."""
        self._waiting.end()
        if self._has_written:
            print(flush=True)

    def _write(self, text: str, *, is_reasoning: bool) -> None:
        if self._is_reasoning and not is_reasoning:
            print(flush=True)
        self._is_reasoning = is_reasoning
        self._has_written = True
        if is_reasoning:
            out.print(harmless(text), style="dim", end="", markup=False)
        else:
            print(harmless(text) if self._screen.is_terminal else text, end="", flush=True)
