"""Turns of a user: lines of a terminal or of a pipe, several between triple quotes, commands with a slash."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Iterator
from typing import TextIO

QUOTES = '"""'
_FIRST_PROMPT = "> "
_NEXT_PROMPT = "… "


class Verb(enum.StrEnum):
    """What a user may ask of the chat itself; each with how it is said, and what it does."""

    HELP = "help"
    SYSTEM = "system"
    UNDO = "undo"
    CLEAR = "clear"
    SAVE = "save"
    LOAD = "load"
    EXIT = "exit"


HELP = {
    Verb.HELP: ("/help", "this"),
    Verb.SYSTEM: ("/system TEXT", "another system prompt; without TEXT shows it"),
    Verb.UNDO: ("/undo", "takes the last turn back"),
    Verb.CLEAR: ("/clear", "forgets all turns but the system prompt"),
    Verb.SAVE: ("/save FILE", "writes the conversation, with its tokens, to a file"),
    Verb.LOAD: ("/load FILE", "goes on with the conversation of a file"),
    Verb.EXIT: ("/exit", "ends, as Ctrl-D does"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A line that began with a slash; `verb` is None where there is no such command."""

    verb: Verb | None
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
        while (line := self._line(_FIRST_PROMPT)) is not None:
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
            line = self._line(_NEXT_PROMPT)
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
    names = {"bye": Verb.EXIT, "quit": Verb.EXIT, "?": Verb.HELP, **{verb.value: verb for verb in Verb}}
    return Command(names.get(word.lower()), argument.strip(), word)
