"""Reply splitter: splits a model's output into text, reasoning and calls. On the rpc thread, one per output.

It does not matter how the output is cut into parts: once neighbours of one kind are joined, the pieces are
the same. Calls that the model writes as JSON are emitted as they arrive, others when they end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icehouse_server.domain.chat import CallPiece, MalformedPiece, Piece, ReasoningPiece, TextPiece
from icehouse_server.text.replies.notation import ReplyCalls
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.values.arguments import Argument, ArgumentsSchema, ValueTooCostly
from icehouse_server.text.values.literals import quoted, sendable, strict
from icehouse_server.text.values.text_source import TextSource


class ReplySplitter:
    """Takes an output's text in parts of any length. `push` and `finish` return pieces that are certain."""

    def __init__(
        self,
        *,
        format: ReplyFormat,
        tools: Sequence[Mapping[str, Any]],
        make_call_id: Callable[[int], str],
        opening: str = "",
        is_reasoning: bool = False,
    ) -> None:
        self._source = TextSource()
        self._pieces: list[Piece] = []
        self._calls = _CheckedCalls(
            source=self._source, tools=tools, make_id=make_call_id, emit=self._pieces.append
        )
        self.calls = self._calls if tools else None
        self.is_reasoning = is_reasoning
        self._reading = format.layout.read(self._source, self)
        self._feed(opening)
        # Pieces of `opening` are emitted with the first pieces that follow.

    @property
    def has_calls(self) -> bool:
        """Whether there has been a valid call."""
        return self.good_count > 0

    @property
    def good_count(self) -> int:
        """Valid calls so far."""
        return self._calls.good_count

    def push(self, text: str) -> list[Piece]:
        self._feed(text)
        return self._emitted()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the output and return what was held back; `is_cut` if a limit ended it, not the model."""
        self._source.end(is_cut=is_cut)
        next(self._reading, None)
        return self._emitted()

    def add_text(self, text: str) -> None:
        """Take text of the answer from the layout."""
        self._pieces.append(TextPiece(text))

    def add_reasoning(self, text: str) -> None:
        """Take reasoning from the layout."""
        self._pieces.append(ReasoningPiece(text))

    def _feed(self, text: str) -> None:
        if text:
            self._source.push(text)
            next(self._reading, None)

    def _emitted(self) -> list[Piece]:
        emitted: list[Piece] = []
        for piece in self._pieces:
            if emitted and (joined := _joined(emitted[-1], piece)) is not None:
                emitted[-1] = joined
            else:
                emitted.append(piece)
        self._pieces.clear()
        return emitted


def _joined(first: Piece, second: Piece) -> Piece | None:
    """Return two pieces as one if the second continues the first; None if it does not."""
    match first, second:
        case (TextPiece(), TextPiece()):
            return TextPiece(first.text + second.text)
        case (ReasoningPiece(), ReasoningPiece()):
            return ReasoningPiece(first.text + second.text)
        case (CallPiece(), CallPiece()) if first.arguments_json and second.arguments_json:
            arguments = first.arguments_json + second.arguments_json
            return dataclasses.replace(first, arguments_json=arguments)
    return None


@dataclasses.dataclass(slots=True)
class _OpenCall:
    """A call that is being read."""

    name: str
    arguments: list[str]
    is_emitted: bool
    problem: str = ""


class _CheckedCalls(ReplyCalls):
    """Turns the calls of one output into pieces for `emit`, and checks each at its end: its tool must be on
    offer, and its arguments must fit the schema. A call that fails is withdrawn; its text is malformed."""

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
            self._open.problem = f"it names a tool not offered: {name[:64]!r}" if name else "it names no tool"
            return
        if not own_id or own_id in self._ids:
            own_id = self._make_id(self._next_index)
        self._ids.add(own_id)
        self._emit(CallPiece(self._next_index, id=sendable(own_id), name=name))

    def add_arguments(self, text: str) -> None:
        assert self._open is not None, "arguments without a call"
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
            except ValueTooCostly as error:
                problem = str(error)
        if problem:
            self._problem = self._problem or problem
            return
        self.name_tool(name)
        members = ", ".join(f"{quoted(member)}: {text}" for member, text in texts.items())
        self.add_arguments(f"{{{members}}}")
        self.end_call(is_repaired=is_repaired)

    def _misfit(self, call: _OpenCall) -> str:
        """Return why the tool cannot take the arguments, "" if it can."""
        try:
            value = strict("".join(call.arguments))
            if not isinstance(value, dict):
                return "its arguments are not a JSON object"
            return self._schema(call.name).problem(value)
        except ValueTooCostly as error:
            return str(error)
        except ValueError:
            return "its arguments are not JSON, or nested too deeply"

    def _schema(self, name: str) -> ArgumentsSchema:
        if name not in self._schemas:
            self._schemas[name] = ArgumentsSchema(self._tools[name]["function"].get("parameters"))
        return self._schemas[name]

    def _withdraw(self) -> None:
        """Withdraw what was emitted of the open call."""
        if self._open is not None and self._open.is_emitted:
            self._emit(CallPiece(self._next_index, is_withdrawn=True))
            self._next_index += 1
        self._open = None

    def _emit_malformed(self) -> None:
        if self._problem:
            self._emit(MalformedPiece(self._source.recorded(), self._problem))
        self._problem = ""
