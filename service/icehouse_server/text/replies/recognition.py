"""Recognition of a model's reply format from what its chat template renders.

The template renders a past turn with known calls, and the model belongs to the family whose reader reads
these calls back. The template's source is not searched. If the template writes no calls, the evidence is the
prompt that offers tools, then the vocabulary's tokens, then the tokenizer's configuration. The reasoning
markers are what the template writes around a known thought.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import re
from collections.abc import Collection, Sequence

from icehouse_server.domain.chat import CallPiece, ChatMessage, MalformedPiece, TextPiece, Tool, ToolCall
from icehouse_server.errors import InvalidRequest
from icehouse_server.text.chat.template import ChatTemplate, offer
from icehouse_server.text.replies.families import FAMILIES
from icehouse_server.text.replies.reply_format import ReplyFamily, ReplyFormat
from icehouse_server.text.replies.reply_splitter import ReplySplitter

# Words that no template contains, so they can be found in its output.
_ASKED, _ANSWERED, _THOUGHT = "qzaskedqz", "qzansweredqz", "qzthoughtqz"
_ARGUMENTS = '{"qzwordqz": "qzvalueqz", "qznumberqz": 71}'
_PARAMETERS = {
    "type": "object",
    "properties": {
        "qzwordqz": {"type": "string", "description": "qzwordaboutqz"},
        "qznumberqz": {"type": "integer", "description": "qznumberaboutqz"},
    },
    "required": ["qzwordqz", "qznumberqz"],
}
_TOOLS = tuple(Tool(name, "qzaboutqz", _PARAMETERS) for name in ("qzfirstqz", "qzsecondqz"))

KNOWN_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|thought_start|>", "<|thought_end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""Markers to look for if the template shows no reasoning of past turns."""

_TAG_BEFORE = re.compile(r"(<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\])\s*$")
_TAG_BEHIND = re.compile(r"\s*(<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\])")
_WORDS = re.compile(r"[a-z]{3,}")
_SIDES = {"start", "end", "begin", "open", "close"}


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer knows about its tokens."""

    tokens: Collection[str]
    added: Collection[str]
    """Tokens that were added to it whole, special or not."""
    special: Collection[str]
    """Tokens that decoding can hide."""
    parser_name: str = ""
    """`tool_parser_type` of tokenizer_config.json."""


def find_reply_format(template: ChatTemplate | None, vocabulary: Vocabulary) -> ReplyFormat:
    """Return how to read a model's replies; `template` is None if it has none."""
    probe = _Probe(template)
    thoughts, seen_in = _thoughts(probe, vocabulary)
    family, found_by = _family(probe, vocabulary, thoughts)
    evidence = [f"calls as {family.name}: {found_by}"] if family.name else []
    if family.layout is not None:
        thoughts, seen_in = family.thoughts, found_by
    if thoughts[0]:
        evidence.append(f"reasoning from {thoughts[0]} to {thoughts[1]}: {seen_in}")
    format = ReplyFormat(family, *thoughts)
    return dataclasses.replace(
        format,
        evidence=tuple(evidence),
        unread_markers=_unread(vocabulary, format),
        hides_markers=_contains(format.layout.markers, vocabulary.special),
        hides_call_markers=_contains(family.call_markers, vocabulary.special),
    )


_LIKE_CALLS = re.compile(r"tool_?call|function_?call|call_start|python_tag|action", re.IGNORECASE)
_LIKE_THOUGHTS = re.compile(r"think|thought|reason|channel", re.IGNORECASE)


def _unread(vocabulary: Vocabulary, format: ReplyFormat) -> tuple[str, ...]:
    """Return the tokens that look like markers but that no reader reads."""
    return tuple(
        sorted(
            token
            for token in vocabulary.added
            if (not format.marks_calls and _LIKE_CALLS.search(token))
            or (not format.marks_reasoning and _LIKE_THOUGHTS.search(token))
        )
    )


class _Probe:
    """Renders probes with a template; returns "" if it refuses, or if there is no template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def render(
        self, *answers: ChatMessage, tools: Sequence[Tool] = (), adds_generation_prompt: bool = False
    ) -> str:
        if self._template is None:
            return ""
        try:
            return self._template.text(
                [ChatMessage("user", _ASKED), *answers],
                tools=tools,
                adds_generation_prompt=adds_generation_prompt,
            )
        except InvalidRequest:
            return ""

    def reply(self, answer: ChatMessage, *, tools: Sequence[Tool] = ()) -> str:
        """Return the text of an answer, from the end of its prompt to the end of its turn."""
        whole = self.render(answer, tools=tools)
        asked = self.render(tools=tools)
        prompt = self.render(tools=tools, adds_generation_prompt=True)
        header = prompt[len(asked) :] if prompt.startswith(asked) else ""
        if prompt and whole.startswith(prompt):
            return whole[len(prompt) :]
        begun = whole[len(asked) :] if asked and whole.startswith(asked) else whole[whole.rfind(_ASKED) :]
        index = begun.find(header) if header else -1
        return begun[index + len(header) :] if index >= 0 else begun.removeprefix(_ASKED)

    @property
    def turn_end(self) -> str:
        """What ends an assistant's turn."""
        text = self.render(ChatMessage("assistant", _ANSWERED))
        return text[text.rfind(_ANSWERED) + len(_ANSWERED) :] if _ANSWERED in text else ""

    @property
    def offer(self) -> str:
        """The prompt that offers tools; empty if tools do not change it."""
        without, with_tools = self.render(), self.render(tools=_TOOLS)
        return "" if without == with_tools else with_tools


def _thoughts(probe: _Probe, vocabulary: Vocabulary) -> tuple[tuple[str, str], str]:
    """Return the markers of reasoning, and where they were seen."""
    for answer in (
        ChatMessage("assistant", _ANSWERED, reasoning=_THOUGHT),
        ChatMessage("assistant", "", reasoning=_THOUGHT, tool_calls=_calls(1)),
    ):
        markers = _around(probe.render(answer, tools=_TOOLS if answer.tool_calls else ()))
        if markers[0]:
            return markers, "the chat template writes thoughts so"
    header = probe.render(adds_generation_prompt=True)
    header = header[header.rfind(_ASKED) :]
    for start, end in KNOWN_THOUGHTS:
        if start in header:
            return (start, end), "the chat template begins a reply so"
    for start, end in KNOWN_THOUGHTS:
        if start in vocabulary.tokens and end in vocabulary.tokens:
            return (start, end), "the vocabulary has them"
    prompt = probe.offer or probe.render()
    for start, end in KNOWN_THOUGHTS:
        if start in prompt and end in prompt:
            return (start, end), "the prompt asks for them"
    return ("", ""), ""


def _around(text: str) -> tuple[str, str]:
    """Return the markers around a thought; empty if there are none."""
    index = text.rfind(_THOUGHT)
    if index < 0:
        return "", ""
    before, behind = text[:index].rstrip(), text[index + len(_THOUGHT) :].lstrip()
    for start, end in KNOWN_THOUGHTS:
        if before.endswith(start) and behind.startswith(end):
            return start, end
    start_tag, end_tag = _TAG_BEFORE.search(before[-80:]), _TAG_BEHIND.match(behind)
    if start_tag is None or end_tag is None:
        return "", ""
    words = [set(_WORDS.findall(tag[1].lower())) - _SIDES for tag in (start_tag, end_tag)]
    return (start_tag[1], end_tag[1]) if words[0] & words[1] else ("", "")


_ID_FORMS = ("{index:09d}", "functions.{name}:{index}")
"""Mistral's templates accept only ids of nine characters; Kimi's write the id but not the name."""


def _calls(count: int, id_form: str = _ID_FORMS[0]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id_form.format(index=index, name=tool.name), tool.name, _ARGUMENTS)
        for index, tool in enumerate(_TOOLS[:count])
    )


def _family(probe: _Probe, vocabulary: Vocabulary, thoughts: tuple[str, str]) -> tuple[ReplyFamily, str]:
    """Return the family of the calls, and the evidence for it; a family without a name if none fits."""
    turn_end = probe.turn_end
    for count, id_form, thought in itertools.product((2, 1), _ID_FORMS, ("", _THOUGHT)):
        calls = _calls(count, id_form)
        answer = ChatMessage("assistant", "", reasoning=thought, tool_calls=calls)
        reply = probe.reply(answer, tools=_TOOLS).removesuffix(turn_end)
        results = [
            read_back(ReplyFormat(family, *thoughts), reply, tools=_TOOLS, calls=calls) for family in FAMILIES
        ]
        # Prefer a notation that reads all of the reply to one that stops earlier.
        if best := max(results):
            return FAMILIES[results.index(best)], "the chat template writes calls so"
    offer = probe.offer
    asked_for = [
        family for family in FAMILIES if family.shown and all(part in offer for part in family.shown)
    ]
    if asked_for:
        # One family's texts may be part of another's.
        longest = max(asked_for, key=lambda family: len(family.shown))
        return longest, "the prompt that offers tools asks for them so"
    for family in FAMILIES:
        if family.tokens and all(token in vocabulary.tokens for token in family.tokens):
            return family, f"the vocabulary has {' and '.join(family.tokens)}"
    for family in FAMILIES:
        if vocabulary.parser_name in (family.name, *family.aliases):
            return family, "the tokenizer's configuration names it"
    return ReplyFamily(), ""


class ReadBackScore(enum.IntEnum):
    """How well a reader reads back a reply whose calls are known."""

    NOTHING = 0
    REPAIRED = 1
    """The calls, but only by repairing them."""
    CALLS = 2
    """The calls, with other text around them."""
    ALL = 3


def read_back(
    format: ReplyFormat, reply: str, *, tools: Sequence[Tool], calls: Sequence[ToolCall]
) -> ReadBackScore:
    """Return how well the reader of a format reads these calls, and no others, back from a reply."""
    if not reply:
        return ReadBackScore.NOTHING
    splitter = ReplySplitter(format=format, tools=[offer(tool) for tool in tools], make_call_id=str)
    emitted = [*splitter.push(reply), *splitter.finish()]
    pieces = [piece for piece in emitted if isinstance(piece, CallPiece)]
    if splitter.good_count != len(calls) or any(piece.is_withdrawn for piece in pieces):
        return ReadBackScore.NOTHING
    for index, call in enumerate(calls):
        own = [piece for piece in pieces if piece.index == index]
        text = "".join(piece.arguments_json for piece in own)
        if own[0].name != call.name or json.loads(text) != json.loads(call.arguments_json):
            return ReadBackScore.NOTHING
    if any(piece.is_repaired for piece in pieces):
        return ReadBackScore.REPAIRED
    others = (piece.text for piece in emitted if isinstance(piece, TextPiece | MalformedPiece))
    return ReadBackScore.ALL if all(map(str.isspace, others)) else ReadBackScore.CALLS


def _contains(texts: Sequence[str], parts: Collection[str]) -> bool:
    return any(part in text for text in texts if text for part in parts if part)
