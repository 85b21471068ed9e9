"""Held output: a tool call until it is complete, and white space until a word follows.

The server may take a call back until it is complete. The protocols have no event for that; its text comes as
text. Models write empty lines before a call, which programs would show as a message with nothing in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse.v1.tool_pb2 import ToolCallDelta
from icehouse_client import ToolCall


class HeldCalls:
    """The call of one output that is not complete yet."""

    def __init__(self) -> None:
        self._index = -1
        self._call: ToolCall | None = None

    def add(self, piece: ToolCallDelta) -> list[ToolCall]:
        """Take a piece; return the call that the beginning of another one shows to be complete."""
        done: list[ToolCall] = []
        if piece.withdrawn:
            self._call = None
            return done
        if self._call is None or piece.index != self._index:
            done = self.flush()
            self._index, self._call = piece.index, ToolCall(piece.id, piece.name, "")
        whole = self._call.arguments_json + piece.arguments_json
        self._call = dataclasses.replace(self._call, arguments_json=whole)
        return done

    def flush(self) -> list[ToolCall]:
        """Return the call that is held, since the output goes on with something else or has ended."""
        done = [] if self._call is None else [self._call]
        self._call = None
        return done


class HeldSpace:
    """White space at the beginning of a text, until a word shows that it belongs to one."""

    def __init__(self) -> None:
        self._space = ""
        self._has_begun = False
        self._has_called = False

    def add(self, text: str) -> str:
        """Take a piece of the text; return what may be written now, all white space before it included."""
        if self._has_begun:
            return text
        self._space += text
        if not self._space or self._space.isspace():
            return ""
        self._has_begun = True
        return self._space

    def drop(self) -> None:
        """Forget what is held, since a call is written: the text behind it begins anew."""
        self._space, self._has_begun, self._has_called = "", False, True

    def flush(self) -> str:
        """Return what is held at the end: white space is an answer where nothing is called."""
        return "" if self._has_begun or self._has_called else self._space


def text_beside(calls: Sequence[ToolCall], text: str) -> str:
    """Return the text of a whole output, or nothing where it is only white space beside calls."""
    return "" if calls and text.isspace() else text
