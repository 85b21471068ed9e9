"""History fit: renames, folds and merges turns as far as a chat template needs it. Pure.

No content is dropped: an unsupported role becomes another one, and an empty turn goes between two turns that
the template does not support in a row. Changes to a turn depend on the turns before it and hardly on later
ones, so that a prompt stays a prefix of the next.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Sequence

from icehouse_server.domain.chat import ChatMessage, PlacedImage, ToolCall
from icehouse_server.text.chat.traits import CallIds, TemplateTraits, ToolPosition

_GAP = "\n\n"
"""The separator between the texts of merged turns."""
_NINE_LETTERS = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = re.compile(r"functions\.(.+):\d+", re.DOTALL)
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SYSTEM_ROLES = ("system", "developer")


def fit(messages: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Return the turns in a form that the template supports."""
    turns = [_known(message, traits) for message in messages]
    turns = _ResultLinks(traits).turns(_merge(turns, roles={"system"}))
    if not traits.shows_tool_results:
        turns = _results_as_text(turns)
    if not traits.shows_tool_calls:
        turns = [_calls_as_text(turn) for turn in turns]
    if not traits.takes_parallel_calls:
        turns = _one_call_a_turn(turns)
    turns = _fold_systems(turns, traits)
    if not traits.takes_repeated_roles:
        turns = _merge(turns, roles={"user", "assistant"})
    if not traits.takes_text_beside_calls:
        turns = [part for turn in turns for part in _text_before_calls(turn)]
    turns = _with_fillers(turns, traits) if traits.takes_repeated_roles else _alternating(turns, traits)
    if traits.tool_position is not ToolPosition.VARIABLE and (not turns or turns[0].role != "system"):
        turns.insert(0, ChatMessage("system", ""))
    return turns


def _known(message: ChatMessage, traits: TemplateTraits) -> ChatMessage:
    """Return the turn with a role that the template knows, and with the filler if it is empty."""
    is_system = message.role == "developer" and not traits.knows_developer
    content = message.content
    if not (content or message.images or message.tool_calls or message.reasoning or message.role == "tool"):
        content = traits.filler
    return dataclasses.replace(message, role="system" if is_system else message.role, content=content)


def _merge(turns: Sequence[ChatMessage], *, roles: set[str]) -> list[ChatMessage]:
    """Merge neighbours of one role. A turn with calls is the last of its row, because results follow."""
    rows: list[list[ChatMessage]] = []
    for turn in turns:
        last = rows[-1][-1] if rows else None
        if last is None or turn.role not in roles or last.role != turn.role or last.tool_calls:
            rows.append([])
        rows[-1].append(turn)
    return [_merged(row) if len(row) > 1 else row[0] for row in rows]


def _merged(row: Sequence[ChatMessage]) -> ChatMessage:
    has_one_name = len({turn.name for turn in row}) == 1
    turns = row if has_one_name else [_named(turn) for turn in row]
    images: list[PlacedImage] = []
    length = 0
    for turn in turns:
        start = length + len(_GAP) if length and turn.content else length
        images += _moved(turn.images, start)
        length = start + len(turn.content)
    return ChatMessage(
        role=turns[0].role,
        content=_joined(*(turn.content for turn in turns)),
        images=tuple(images),
        name=turns[0].name,
        reasoning=_joined(*(turn.reasoning for turn in turns)),
        tool_calls=turns[-1].tool_calls,
    )


def _named(turn: ChatMessage) -> ChatMessage:
    """Return the turn with its speaker's name in its text, so it can be merged with another speaker's."""
    if turn.name is None:
        return turn
    head = f"{turn.name}: "
    images = _moved(turn.images, len(head))
    return dataclasses.replace(turn, name=None, content=head + turn.content, images=images)


class _ResultLinks:
    """Links the results of one history to their calls. Ids become unique and get a form that the template
    supports. Results follow their calls in the calls' order, with the tool's name."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self._turns: list[ChatMessage] = []
        self._open: list[tuple[str, ToolCall]] = []
        """The latest turn's calls without a result: the id that was sent, and the call for the template."""
        self._row: list[ChatMessage] = []
        """Results of the latest turn's calls."""
        self._ids: dict[str, str] = {}
        """The new id by the id that was sent."""
        self._taken: set[str] = set()
        self._call_count = 0

    def turns(self, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
        for turn in turns:
            if turn.role == "tool":
                self._take_result(turn)
                continue
            self._close_row()
            if self._open and not self._traits.takes_open_calls:
                silent = ChatMessage("tool", self._traits.filler)
                self._turns += [_answer(silent, call) for _, call in self._open]
            self._open = []
            self._turns.append(self._with_ids(turn) if turn.tool_calls else turn)
        self._close_row()
        return self._turns

    def _with_ids(self, turn: ChatMessage) -> ChatMessage:
        for call in turn.tool_calls:
            id = self._id(call.id, call.name)
            self._open.append((call.id, dataclasses.replace(call, id=id)))
        return dataclasses.replace(turn, tool_calls=tuple(call for _, call in self._open))

    def _id(self, sent_id: str, name: str) -> str:
        """Return the id of the next call: the one that was sent, if the template supports it."""
        index, self._call_count = self._call_count, self._call_count + 1
        id = _id_as_taken(sent_id or f"call_{index}", name, index, self._traits)
        while id in self._taken:  # some servers begin each turn at call_0
            index += 1
            id = _id_as_taken(f"{sent_id}_{index}", name, index, self._traits)
        self._ids[sent_id] = id
        self._taken.add(id)
        return id

    def _take_result(self, result: ChatMessage) -> None:
        call = self._called(result)
        if call is not None:
            self._row.append(_answer(result, call))
            return
        self._close_row()
        if self._traits.takes_stray_results:
            id = self._ids.get(result.tool_call_id) or self._id(result.tool_call_id, result.name or "tool")
            self._turns.append(dataclasses.replace(result, tool_call_id=id))
        else:
            self._turns.append(_result_as_text(result))

    def _called(self, result: ChatMessage) -> ToolCall | None:
        """Return the open call of a result: the call with its id, or the next one if no call has this id."""
        matches = [each for each in self._open if each[0] == result.tool_call_id]
        if not matches and result.tool_call_id not in self._ids:
            matches = [each for each in self._open if each[1].name == result.name] or self._open
        if not matches:
            return None
        first = matches[0]
        self._open.remove(first)
        return first[1]

    def _close_row(self) -> None:
        if not self._row:
            return
        calls = next(turn.tool_calls for turn in reversed(self._turns) if turn.tool_calls)
        order = {call.id: index for index, call in enumerate(calls)}
        self._turns += sorted(self._row, key=lambda result: order[result.tool_call_id])
        self._row = []


def _answer(result: ChatMessage, call: ToolCall) -> ChatMessage:
    return dataclasses.replace(result, tool_call_id=call.id, name=result.name or call.name)


def _id_as_taken(id: str, name: str, index: int, traits: TemplateTraits) -> str:
    if traits.call_ids is CallIds.NINE_LETTERS and _NINE_LETTERS.fullmatch(id) is None:
        number = int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        return "".join(_LETTERS[number // len(_LETTERS) ** digit % len(_LETTERS)] for digit in range(9))
    if traits.call_ids is CallIds.NAMED:
        match = _NAMED.fullmatch(id)
        return id if match is not None and match[1] == name else f"functions.{name}:{index}"
    return id


def _results_as_text(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the turns with each row of results replaced by a user's turn."""
    texts: list[ChatMessage] = []
    for is_result, row in itertools.groupby(turns, key=lambda turn: turn.role == "tool"):
        if is_result:
            texts.append(ChatMessage("user", "\n".join(_result_as_text(turn).content for turn in row)))
        else:
            texts += row
    return texts


def _result_as_text(result: ChatMessage) -> ChatMessage:
    return ChatMessage("user", f"<tool_response>\n{result.content}\n</tool_response>")


def _calls_as_text(turn: ChatMessage) -> ChatMessage:
    """Return the turn with its calls as text, in the form that most models know."""
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_json}}}\n</tool_call>'
        for call in turn.tool_calls
    )
    return dataclasses.replace(turn, content=_joined(turn.content, calls), tool_calls=())


def _one_call_a_turn(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the turns with each call in a turn of its own, followed by its result."""
    single: list[ChatMessage] = []
    waiting: list[ChatMessage] = []
    for turn in turns:
        if turn.role == "tool" and waiting:
            index = next((i for i, w in enumerate(waiting) if w.tool_calls[0].id == turn.tool_call_id), None)
            if index is not None:
                single += [waiting.pop(index), turn]
                continue
        if turn.role != "tool":
            single += waiting
            waiting = []
        if len(turn.tool_calls) < 2:
            single.append(turn)
            continue
        first, *others = turn.tool_calls
        waiting = [dataclasses.replace(turn, tool_calls=(first,))]
        waiting += [ChatMessage(turn.role, "", turn.name, tool_calls=(call,)) for call in others]
    return single + waiting


def _text_before_calls(turn: ChatMessage) -> list[ChatMessage]:
    """Return the turn's text and its calls as two turns. Reasoning stays with the calls: templates that drop
    reasoning keep that of an open tool loop."""
    if not (turn.tool_calls and turn.content):
        return [turn]
    text = dataclasses.replace(turn, reasoning="", tool_calls=())
    return [text, dataclasses.replace(turn, content="", images=(), token_ids=())]


def _fold_systems(turns: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Move the text of unsupported system turns into the user's turn that follows. If none follows, the text
    becomes a user's turn."""
    is_alone = all(turn.role in _SYSTEM_ROLES for turn in turns)
    folded: list[ChatMessage] = []
    waiting = ""
    for index, turn in enumerate(turns):
        takes = traits.takes_first_system if index == 0 else traits.takes_later_system
        if turn.role in _SYSTEM_ROLES and not (takes and (traits.takes_lone_system or not is_alone)):
            waiting = _joined(waiting, turn.content)
            continue
        if turn.role == "user" and waiting:
            content = _joined(waiting, turn.content)
            images = _moved(turn.images, len(content) - len(turn.content))
            folded.append(dataclasses.replace(turn, content=content, images=images))
            waiting = ""
            continue
        if waiting and turn.role != "tool":  # nothing may come between a call and its result
            folded.append(ChatMessage("user", waiting))
            waiting = ""
        folded.append(turn)
    if waiting:
        folded.append(ChatMessage("user", waiting))
    return folded


def _alternating(turns: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Return the turns with fillers, so that user and assistant alternate. Results do not count. Calls need a
    user's turn before them as well."""
    filled: list[ChatMessage] = []
    expected = "user"
    for turn in turns:
        if turn.role in ("user", "assistant"):
            if turn.role != expected:
                filled.append(ChatMessage(expected, traits.filler))
            expected = "user" if turn.role == "assistant" and not turn.tool_calls else "assistant"
        filled.append(turn)
    return filled


def _with_fillers(turns: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Return the turns with a filler before each turn that the template does not support at its position."""
    filled: list[ChatMessage] = []
    for turn in turns:
        is_first = all(before.role in _SYSTEM_ROLES for before in filled)
        if turn.role == "assistant" and is_first and not traits.takes_first_assistant:
            filled.append(ChatMessage("user", traits.filler))
        if (
            turn.role == "user"
            and filled
            and filled[-1].role == "tool"
            and not traits.takes_user_after_result
        ):
            filled.append(ChatMessage("assistant", traits.filler))
        filled.append(turn)
    return filled


def _moved(images: Sequence[PlacedImage], length: int) -> tuple[PlacedImage, ...]:
    return tuple(dataclasses.replace(placed, position=placed.position + length) for placed in images)


def _joined(*texts: str) -> str:
    return _GAP.join(filter(None, texts))
