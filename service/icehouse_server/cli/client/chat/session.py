"""Chat session: turns in, answers out, in one conversation, which lets each turn start from the cache."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import typer
from icehouse_client import Client, Conversation, IcehouseClientError, Options

from icehouse_server.cli.client.chat.screen import Screen, Style
from icehouse_server.cli.client.chat.turns import Command, Turn, TurnReader, Verb
from icehouse_server.cli.client.connection import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    failure_text,
)
from icehouse_server.cli.client.prompt_options import read_conversation
from icehouse_server.cli.terminal.console import complain
from icehouse_server.errors import ConfigError, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Who answers, and how."""

    client: Client
    address: str
    options: Options


def converse(
    server: Server, talk: Conversation, *, is_json: bool, is_quiet: bool, save_to: Path | None = None
) -> None:
    """Go on with a conversation on the terminal, or through a pipe, until its end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(Style(is_terminal=is_terminal, is_json=is_json, is_quiet=is_quiet))
    [served, *_] = server.client.models()
    screen.greet(served.id, served.context_tokens)
    session = ChatSession(server, talk, screen, is_terminal=is_terminal, save_to=save_to)
    session.run(TurnReader(sys.stdin, is_terminal=is_terminal))


class ChatSession:
    """One conversation. Without a terminal the first thing that fails ends it, with an exit code."""

    def __init__(
        self,
        server: Server,
        talk: Conversation,
        screen: Screen,
        *,
        is_terminal: bool,
        save_to: Path | None = None,
    ) -> None:
        self.talk = talk
        self._server = server
        self._screen = screen
        self._is_terminal = is_terminal
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
            options: Options = {**self._server.options, "session_id": self.talk.session_id}
            stream = self._server.client.stream(self.talk, **options)
            with stream, self._screen.answer() as answer:
                for event in stream.events():
                    answer.take(event)
            reply = stream.reply
        except IcehouseClientError as error:
            self.talk.undo()
            hint = (
                "; /undo takes turns back, /clear all of them"
                if error.reason == Reason.PROMPT_TOO_LONG.value
                else ""
            )
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
            self._set_system(command.argument)
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

    def _set_system(self, text: str) -> None:
        if text:
            self.talk.system = text
        self._screen.note(f"system prompt: {self.talk.system or 'none'}")

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
        except ConfigError as error:
            self._fail(error.message, EXIT_USAGE)
        else:
            self._screen.note(f"{len(self.talk)} messages from {path}")

    def _fail(self, message: str, code: int) -> None:
        complain(message)
        if not self._is_terminal:
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
