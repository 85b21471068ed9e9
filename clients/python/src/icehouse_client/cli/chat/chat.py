"""`icehouse chat`: talk with a served model, on a terminal or through a pipe, each turn from the cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from icehouse_client.cli.chat.screen import Screen
from icehouse_client.cli.chat.turns import Command, Turn, TurnReader, Verb
from icehouse_client.cli.connection import Server, failure_text, server_of
from icehouse_client.cli.console import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    AsJson,
    UsageError,
    complain,
)
from icehouse_client.cli.generate import answer_options_of
from icehouse_client.cli.option_groups import said, with_groups
from icehouse_client.cli.prompt import Adapter, Model, read_conversation
from icehouse_client.conversation import Conversation
from icehouse_client.errors import IcehouseClientError
from icehouse_client.requests import Options

System = Annotated[str, typer.Option(help="System prompt.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the answers only.")]


@with_groups(server=server_of, answer=answer_options_of)
def chat(
    server: Server,
    answer: Options,
    system: System = "",
    load: Annotated[Path | None, typer.Option(help="Go on with a saved conversation.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the conversation here after each turn.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(help="Whether a model that can think first does; by default as its template says."),
    ] = None,
    model: Model = "",
    adapter: Adapter = "",
    tenant: Annotated[
        str, typer.Option(help="Whose conversation it is, for operators.", show_default=False)
    ] = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Talk with a model. Each line is a turn, also from a pipe; triple quotes hold several; /help lists more.

    Below each answer stands how many of its prompt's tokens came from the cache.
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
    [served, *_] = server.client.models()
    screen.greet(served.id, served.context_tokens)
    session = ChatSession(server, talk, options, screen, save_to=save_to)
    session.run(TurnReader(sys.stdin, is_terminal=is_terminal))


class ChatSession:
    """One conversation. Without a terminal the first thing that fails ends it, with an exit code."""

    def __init__(
        self,
        server: Server,
        talk: Conversation,
        options: Options,
        screen: Screen,
        *,
        save_to: Path | None = None,
    ) -> None:
        self.talk = talk
        self._server = server
        self._options = options
        self._screen = screen
        self._save_to = save_to

    def run(self, turns: Iterable[Turn]) -> None:
        """Go through the turns until they end or a command ends them."""
        for turn in turns:
            if isinstance(turn, Command):
                if turn.verb is Verb.EXIT:
                    return
                self._obey(turn)
            elif turn:
                self._ask(turn)

    def _ask(self, text: str) -> None:
        self.talk.say(text)
        try:
            options: Options = {**self._options, "session_id": self.talk.session_id}
            stream = self._server.client.stream(self.talk, **options)
            with stream, self._screen.answer() as answer:
                for event in stream.events():
                    answer.take(event)
            reply = stream.reply
        except IcehouseClientError as error:
            self.talk.undo()
            is_long = error.reason == "PROMPT_TOO_LONG"
            hint = "; /undo takes turns back, /clear all of them" if is_long else ""
            self._fail(failure_text(error, self._server.address) + hint, EXIT_FAILURE)
        except KeyboardInterrupt:
            self.talk.undo()
            self._fail("interrupted; the turn is not kept", EXIT_INTERRUPTED)
        else:
            self.talk.add(reply)
            self._screen.finish(reply)
            if self._save_to is not None:
                self._save(self._save_to)

    def _obey(self, command: Command) -> None:
        if command.verb is Verb.HELP:
            self._screen.help()
        elif command.verb is Verb.UNDO:
            self.talk.undo()
            self._screen.note(f"{len(self.talk)} messages are left")
        elif command.verb is Verb.CLEAR:
            self.talk = Conversation(system=self.talk.system)
            self._screen.note("forgotten")
        elif command.verb is Verb.SYSTEM:
            self.talk.system = command.argument or self.talk.system
            self._screen.note(f"system prompt: {self.talk.system or 'none'}")
        elif command.verb is Verb.SAVE and (path := command.argument or self._save_to):
            self._save(Path(path))
        elif command.verb is Verb.LOAD and command.argument:
            self._load(Path(command.argument))
        elif command.verb is None:
            self._fail(
                f'there is no /{command.word}; /help lists what there is, """ around a turn sends it as is',
                EXIT_USAGE,
            )
        else:
            self._fail(f"/{command.word} wants the name of a file", EXIT_USAGE)

    def _save(self, path: Path) -> None:
        try:
            write_conversation(path.expanduser(), self.talk)
        except OSError as error:
            self._fail(f"{path} cannot be written ({error.strerror}); name another file", EXIT_FAILURE)
        else:
            self._screen.note(f"saved to {path}")

    def _load(self, path: Path) -> None:
        try:
            self.talk = read_conversation(path)
        except UsageError as error:
            self._fail(str(error), EXIT_USAGE)
        else:
            self._screen.note(f"{len(self.talk)} messages from {path}")

    def _fail(self, message: str, code: int) -> None:
        complain(message)
        if not self._screen.is_terminal:
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
