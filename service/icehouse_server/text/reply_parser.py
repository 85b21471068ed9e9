"""Reply parser: what the model says, thinks and calls, apart. On the rpc thread, one for each output.

The pieces do not depend on how the text was cut: neighbours of one kind, joined, are always the same.

The text of a section of tool calls, told as it is written.

Formats whose arguments are JSON on the wire are told piece by piece; of the others nothing is known
before the section ends. mlx-lm's parser has the last word over both: what it reads otherwise than it
was told is withdrawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icehouse_server.domain.chat import CallPiece, MalformedPiece, Piece, ReasoningPiece, TextPiece, ToolCall
from icehouse_server.text.reply_format import REASONING, ReplyFormat


class ReplySplitter:
    """Takes an output's text in any pieces. `push` and `finish` return what has become certain."""

    def __init__(
        self,
        *,
        format: ReplyFormat,
        tools: Sequence[dict[str, Any]],
        make_call_id: Callable[[int], str],
        opening: str = "",
        is_reasoning: bool = False,
    ) -> None:
        self._format = format
        self._tools = tools
        self._make_call_id = make_call_id
        self._machine = format.make_machine(bool(tools), REASONING if is_reasoning else "")
        self._section: CallStream | None = None
        self._next_call_index = 0
        self._readable_call_count = 0
        self._early: list[Piece] = []
        self._early = self.push(opening)
        """Pieces of the text that the prompt ended with; told with the first that follow."""

    @property
    def has_calls(self) -> bool:
        """Whether a call that can be read has ended."""
        return self._readable_call_count > 0

    def push(self, text: str) -> list[Piece]:
        """Add text."""
        pieces = self._take_early()
        for state, segment in self._machine.split(text):
            pieces += self._take(state, segment)
        return pieces

    def finish(self) -> list[Piece]:
        """End the output: whatever was held back is what it seemed to be."""
        pieces = self._take_early()
        state, held = self._machine.flush()
        pieces += self._take(state, held)
        # Without an end marker the end of the output is the end of the section.
        return pieces + self._end_section(has_end=False)

    def _take_early(self) -> list[Piece]:
        early, self._early = self._early, []
        return early

    def _take(self, state: str | None, text: str) -> list[Piece]:
        if state == "tool":
            if self._section is None:
                self._section = CallStream(
                    format=self._format,
                    tools=self._tools,
                    first_index=self._next_call_index,
                    make_id=self._make_call_id,
                )
            return self._section.push(text)
        pieces = self._end_section(has_end=True)
        if text and state == REASONING:
            pieces.append(ReasoningPiece(text))
        elif text and state == "normal":
            pieces.append(TextPiece(text))
        return pieces

    def _end_section(self, *, has_end: bool) -> list[Piece]:
        if self._section is None:
            return []
        section, self._section = self._section, None
        pieces = section.finish(has_end=has_end)
        self._readable_call_count += section.call_count
        self._next_call_index = section.next_index
        return pieces


SECTION_LENGTH_LIMIT = 1 << 18
"""Characters of one section. The parsers search with regular expressions, on the event loop."""

_HEAD_LENGTH_LIMIT = 1000
"""Characters within which a call names its tool. It is looked for with every token until it does."""

_STRING = r'"(?:[^"\\]|\\.)*"'
# What stands before the arguments of a call, by the name of mlx-lm's parser.
_HEADS = {
    "json_tools": re.compile(rf'\s*\{{\s*"name"\s*:\s*(?P<quoted>{_STRING})\s*,\s*"arguments"\s*:\s*(?=\{{)'),
    "mistral": re.compile(r"\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"),
    "kimi_k2": re.compile(
        r"\s*(?:<\|tool_call_end\|>\s*)?<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
}
_MARKS = re.compile(r'["\\{}\[\]]')


class UnreadableCall(Exception):
    """A section that is no tool call; the message says why, in words."""


class CallStream:
    """One section, from its start marker to its end. `first_index` is the number of its first call."""

    def __init__(
        self,
        *,
        format: ReplyFormat,
        tools: Sequence[dict[str, Any]],
        first_index: int,
        make_id: Callable[[int], str],
    ) -> None:
        self._format = format
        self._tools = list(tools)
        self._make_id = make_id
        self._head = _HEADS.get(format.parser_name)
        self._text = ""
        self._position = 0
        """Where the part of `_text` begins that no piece was made of."""
        self._told: list[_ToldCall] = []
        self.call_count = 0
        """Calls that can be read; known at the end."""
        self.next_index = first_index
        """The number of the call after the last one told, withdrawn ones included."""

    def push(self, text: str) -> list[Piece]:
        """Add text; return what is certain about the calls in it."""
        self._text += text
        pieces: list[Piece] = []
        while self._head is not None:
            if self._told and not self._told[-1].is_complete:
                self._position += self._argue(self._told[-1], pieces)
                if not self._told[-1].is_complete:
                    break
            head = self._head.match(self._text, self._position, self._position + _HEAD_LENGTH_LIMIT)
            name = None if head is None else _name_in(head)
            if head is None or name is None:
                break
            self._position = head.end()
            self._told.append(self._begin(name, head.groupdict().get("id"), pieces))
        return pieces

    def finish(self, *, has_end: bool) -> list[Piece]:
        """End the section; return its last pieces."""
        withdrawn: list[Piece] = [CallPiece(call.index, is_withdrawn=True) for call in self._told]
        try:
            calls = self._read(has_end=has_end)
        except UnreadableCall as error:
            raw = self._format.call_start + self._text + (self._format.call_end if has_end else "")
            return [*withdrawn, MalformedPiece(raw, str(error))]
        self.call_count = len(calls)
        if self._was_told(calls):
            return self._tell_whole(calls[len(self._told) :])
        return withdrawn + self._tell_whole(calls)

    def _begin(self, name: str, own_id: str | None, pieces: list[Piece]) -> _ToldCall:
        call = _ToldCall(self.next_index, name)
        self.next_index += 1
        pieces.append(CallPiece(call.index, id=own_id or self._make_id(call.index), name=call.name))
        return call

    def _tell_whole(self, calls: Sequence[ToolCall]) -> list[Piece]:
        pieces: list[Piece] = []
        for index, call in enumerate(calls, self.next_index):
            pieces.append(CallPiece(index, id=call.id or self._make_id(index), name=call.name))
            pieces.append(CallPiece(index, arguments_json=call.arguments_json))
        self.next_index += len(calls)
        return pieces

    def _argue(self, call: _ToldCall, pieces: list[Piece]) -> int:
        """Take what belongs to the call's arguments; return how many characters that is."""
        taken = call.take(self._text[self._position :])
        if taken:
            pieces.append(CallPiece(call.index, arguments_json=taken))
        return len(taken)

    def _read(self, *, has_end: bool) -> list[ToolCall]:
        if len(self._text) > SECTION_LENGTH_LIMIT:
            raise UnreadableCall(f"it is longer than {SECTION_LENGTH_LIMIT} characters")
        assert self._format.parse is not None, "a section of calls in a format that has none"
        try:
            parsed = self._format.parse(self._text, self._tools)
        except Exception as error:  # a parser of a text that a model has written raises what it likes
            ended = "" if has_end or not self._format.call_end else ", and the output ended inside it"
            kind = type(error).__name__
            raise UnreadableCall(
                f"the {self._format.parser_name} parser cannot read it: {kind}{ended}"
            ) from error
        calls = [_checked(entry, self._tools) for entry in (parsed if isinstance(parsed, list) else [parsed])]
        if not calls:
            raise UnreadableCall("there is no call in it")
        return calls

    def _was_told(self, calls: Sequence[ToolCall]) -> bool:
        """Whether what was told are the first of `calls`."""
        pairs = zip(self._told, calls, strict=False)
        return len(self._told) <= len(calls) and all(told.says(call) for told, call in pairs)


class _ToldCall:
    """A call whose arguments are being told. `is_complete` once their last brace has come."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.is_complete = False
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def take(self, text: str) -> str:
        """Return the beginning of `text` that belongs to the arguments."""
        end = len(text)
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            mark = _MARKS.search(text, position)
            if mark is None:
                break
            position = mark.end()
            if self._passes(mark[0]):
                end = position
                break
        self._arguments.append(text[:end])
        return text[:end]

    def says(self, call: ToolCall) -> bool:
        """Whether what was told means the same as `call`."""
        try:
            arguments = json.loads("".join(self._arguments))
            return self.name == call.name and bool(arguments == json.loads(call.arguments_json))
        except (ValueError, RecursionError):
            return False

    def _passes(self, mark: str) -> bool:
        """Note a mark; tell whether it ends the arguments."""
        if self._in_string:
            self._is_escaped = mark == "\\"
            self._in_string = mark != '"'
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0
        return self.is_complete


def _name_in(head: re.Match[str]) -> str | None:
    """Return the tool's name; None where it is no JSON, which the parser has to say at the section's end."""
    found = head.groupdict()
    if not found.get("quoted"):
        return str(found["name"])
    try:
        return _sendable(json.loads(found["quoted"], strict=False))
    except ValueError:
        return None


def _checked(entry: Any, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Return a parser's finding as a call; raises UnreadableCall when it is none."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise UnreadableCall("it names no tool")
    arguments = entry.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise UnreadableCall("its arguments are text that is no JSON, or nested too deep") from None
    if not isinstance(arguments, Mapping):
        raise UnreadableCall("its arguments are no JSON object")
    offered = {tool["function"]["name"] for tool in tools}
    if entry["name"] not in offered and set(arguments) == {"raw"}:
        # So mlx-lm's glm47 parser hands back what it could not read.
        raise UnreadableCall("it names no tool on offer and has no arguments that can be read")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UnreadableCall("its arguments hold a value that JSON has not, or are nested too deep") from None
    own_id = entry.get("id")
    return ToolCall(
        id=_sendable(own_id) if isinstance(own_id, str) else "",
        name=_sendable(entry["name"]),
        arguments_json=_sendable(text),
    )


def _sendable(text: str) -> str:
    """Return text that UTF-8 can hold: a model may write half of a surrogate pair as JSON's escape."""
    return text.encode("utf-8", "replace").decode("utf-8")
