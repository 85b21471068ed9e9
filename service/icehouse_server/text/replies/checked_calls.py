"""Checked calls: tool calls on their way from a notation to pieces, checked before they count.

A notation reports a call while it reads it. At its end the call is checked: its tool must be on offer, and
its arguments must fit the schema. A call that fails is withdrawn, and its text is emitted as malformed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icehouse_server.domain.chat import CallPiece, MalformedPiece, Piece
from icehouse_server.text.values.arguments import Argument, ArgumentsSchema, TooCostly, as_object
from icehouse_server.text.values.literals import sendable, strict
from icehouse_server.text.values.text_source import TextSource

SECTION_LENGTH_LIMIT = 1 << 18
"""Characters of one section of calls: what is read is kept until the section ends."""


class ReplyCalls:
    """Takes what a notation reads, in the order of the text.

    This class checks and keeps nothing. It is enough for readers that only want to know where calls end.
    """

    good_count = 0
    """Calls that count."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def begin_section(self, marker: str) -> None:
        """Record the text from here on; `marker` was read already and comes first."""
        self._source.record(marker, limit=SECTION_LENGTH_LIMIT)

    def end_section(self, *, problem: str = "") -> bool:
        """Stop recording; return whether all of the section could be read."""
        self._source.stop_recording()
        return not problem

    def offers(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return True

    def has_argument(self, tool: str, argument: str) -> bool:
        """Whether the tool may have an argument of this name."""
        return False

    def begin_call(self) -> None:
        """Begin a call."""

    def name_tool(self, name: str, own_id: str = "") -> None:
        """Take the name of the call's tool; its arguments follow as JSON."""

    def add_arguments(self, text: str) -> None:
        """Take more text of the arguments, which are one JSON object."""

    def end_call(self, *, is_repaired: bool = False, problem: str = "") -> None:
        """End the call. `problem` says why it does not count although it could be read."""

    def add_untyped(
        self, name: str, arguments: Sequence[Argument], *, is_python: bool = False, is_repaired: bool = False
    ) -> None:
        """Take a whole call whose text gives its arguments no types."""


@dataclasses.dataclass(slots=True)
class _OpenCall:
    """A call that is being read."""

    name: str
    arguments: list[str]
    is_emitted: bool
    problem: str = ""


class CheckedCalls(ReplyCalls):
    """The calls of one output. `emit` takes the pieces, in order."""

    def __init__(
        self,
        *,
        source: TextSource,
        tools: Sequence[Mapping[str, Any]],
        make_id: Callable[[int], str],
        emit: Callable[[Piece], None],
    ) -> None:
        super().__init__(source)
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._schemas: dict[str, ArgumentsSchema] = {}
        self._make_id = make_id
        self._emit = emit
        self._next_index = 0
        self._open: _OpenCall | None = None
        self._problem = ""
        """Why the text since the last good call is malformed."""
        self._ids: set[str] = set()
        self.good_count = 0

    def begin_section(self, marker: str) -> None:
        super().begin_section(marker)
        self._problem = ""

    def end_section(self, *, problem: str = "") -> bool:
        if problem:
            self._withdraw()
            self._problem = self._problem or problem
        is_good = not self._problem
        self._emit_malformed()
        self._source.stop_recording()
        return is_good

    def offers(self, name: str) -> bool:
        return name in self._tools

    def has_argument(self, tool: str, argument: str) -> bool:
        return tool in self._tools and self._schema(tool).has_argument(argument)

    def begin_call(self) -> None:
        self._emit_malformed()

    def name_tool(self, name: str, own_id: str = "") -> None:
        self._open = _OpenCall(name, [], is_emitted=self.offers(name))
        if not self._open.is_emitted:
            self._open.problem = f"it names no tool on offer: {name[:64]!r}" if name else "it names no tool"
            return
        if not own_id or own_id in self._ids:
            own_id = self._make_id(self._next_index)
        self._ids.add(own_id)
        self._emit(CallPiece(self._next_index, id=sendable(own_id), name=name))

    def add_arguments(self, text: str) -> None:
        assert self._open is not None, "arguments of no call"
        if not text:
            return
        self._open.arguments.append(text)
        if self._open.is_emitted:
            self._emit(CallPiece(self._next_index, arguments_json=sendable(text)))

    def end_call(self, *, is_repaired: bool = False, problem: str = "") -> None:
        if self._open is None:
            self._problem = self._problem or problem or "it names no tool"
            return
        problem = problem or self._open.problem or self._misfit(self._open)
        if problem:
            self._withdraw()
            self._problem = problem
            return
        if is_repaired:
            self._emit(CallPiece(self._next_index, is_repaired=True))
        self._open = None
        self._next_index += 1
        self.good_count += 1
        self._source.recorded()

    def add_untyped(
        self, name: str, arguments: Sequence[Argument], *, is_python: bool = False, is_repaired: bool = False
    ) -> None:
        texts, problem = {}, ""
        if self.offers(name):
            try:
                for argument in arguments:
                    if argument.name in texts:
                        problem = f"it has the argument {argument.name[:64]!r} twice"
                    read = self._schema(name).read(argument, is_python=is_python)
                    texts[argument.name] = read.json_text
                    is_repaired = is_repaired or read.is_repaired
            except TooCostly as error:
                problem = str(error)
        if problem:
            self._problem = self._problem or problem
            return
        self.name_tool(name)
        self.add_arguments(as_object(texts))
        self.end_call(is_repaired=is_repaired)

    def _misfit(self, call: _OpenCall) -> str:
        """Return why the tool cannot take the arguments, "" where it can."""
        try:
            value = strict("".join(call.arguments))
            if not isinstance(value, dict):
                return "its arguments are no JSON object"
            return self._schema(call.name).problem(value)
        except TooCostly as error:
            return str(error)
        except ValueError:
            return "its arguments are no JSON, or nested too deep"

    def _schema(self, name: str) -> ArgumentsSchema:
        if name not in self._schemas:
            self._schemas[name] = ArgumentsSchema(self._tools[name]["function"].get("parameters"))
        return self._schemas[name]

    def _withdraw(self) -> None:
        """Take back what was emitted of the open call."""
        if self._open is not None and self._open.is_emitted:
            self._emit(CallPiece(self._next_index, is_withdrawn=True))
            self._next_index += 1
        self._open = None

    def _emit_malformed(self) -> None:
        if self._problem:
            self._emit(MalformedPiece(self._source.recorded(), self._problem))
        self._problem = ""
