"""Held calls: a tool call is written when it is complete, since the server may take one back until then.

The protocols have no event for a call that turned out to be none; its text comes as text.
"""

from __future__ import annotations

import dataclasses

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
