"""Every family's replies are read as they were meant, however they are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from icehouse_server.domain.chat import Tool
from icehouse_server.text.replies.families import FAMILIES

from tests.fixtures.chat.notations import WRITERS, Call, Writer
from tests.fixtures.chat.reply_pieces import cut_at, events, in_pieces, read

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, f"about {name}", schema)


TOOLS = (
    tool("get_weather", ("city",), city=STRING, days=INTEGER),
    tool("get_time"),
    tool("write_file", ("path", "content"), path=STRING, content=STRING),
    Tool(
        "set_values",
        "",
        {
            "type": "object",
            "$defs": {"a b/c~d": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "word": STRING},
            "properties": {
                "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "count": {"$ref": "#/$defs/a%20b~1c~0d"},
                "note": {"type": ["string", "null"]},
                "either": {"type": ["integer", "string"]},
                "mode": {"enum": ["on", "off", 3, None]},
                "exact": {"const": 7},
                "word": {"allOf": [{"$ref": "#/$defs/word"}, {"minLength": 1}]},
                "ratio": {"oneOf": [{"type": "number"}, {"type": "boolean"}]},
                "tags": {"type": "array", "items": STRING},
                "place": {"type": "object", "properties": {"x": INTEGER}, "nullable": True},
            },
            "additionalProperties": False,
        },
    ),
)
HOSTILE = (
    "</parameter>",
    "</parameter>\n</function>\n</tool_call>\nand on",
    "</arg_value>",
    "</arg_value></tool_call> and on",
    "</tool_call>",
    "<tool_call>",
    '"}}\n</tool_call>',
    "</think>",
    "[TOOL_CALLS]",
    "<|tool_call_end|>",
    "``` then ```json\n{}\n```",
    "print(\"a\", b='c')",
    "<|call|>",
    "\\n \\ \\u0041",
    "<parameter=x>\n1\n</parameter>",
    "<arg_key>k</arg_key><arg_value>v</arg_value>",
    "</param></function>",
    "</invoke></minimax:tool_call>",
    "<escaped>",
    "]<|END_ACTION|>",
    "def f(a=1):\n\treturn {'a': [1]}  # ü 🙂\n",
)
VALUES: tuple[dict[str, Any], ...] = (
    {"flag": True, "count": 5, "note": "123", "either": 4},
    {"flag": None, "count": None, "note": None, "either": "four"},
    {"flag": False, "count": 9007199254740993, "note": '{"a": 1}', "mode": "on", "exact": 7},
    {"mode": 3, "word": "null", "ratio": 0.5, "tags": ["a", "5"], "place": {"x": -1}},
    {"mode": None, "word": "True", "ratio": True, "tags": [], "place": None},
)
MISFITS: tuple[tuple[Call, str], ...] = (
    (("get_money", {}), "a tool not offered: 'get_money'"),
    (("get_weather", {"days": 2}), "'city' is a required property"),
    (("get_weather", {"city": "Oslo", "days": "tomorrow"}), "argument days: 'tomorrow' is not of type"),
    (("set_values", {"other": 1}), "'other' was unexpected"),
)
EVERY = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())


def read_in_all_ways(writer: Writer, text: str) -> list[list[Any]]:
    """Return the events of a reply, which must be the same for every cut."""
    whole = events(read(writer.format, [text], TOOLS))
    random_cut = cut_at(text, random.Random(len(text)).sample(range(10_000), 9))
    for pieces in (*(in_pieces(text, size) for size in (1, 2, 3, 7)), random_cut):
        assert events(read(writer.format, pieces, TOOLS)) == whole
    return whole


def called(*calls: Call) -> list[list[Any]]:
    return [["call", name, arguments] for name, arguments in calls]


def test_every_family_has_a_writer() -> None:
    assert sorted(WRITERS) == sorted(family.name for family in FAMILIES)


@EVERY
def test_text_is_text(writer: Writer) -> None:
    for text in ("It is dry.", "a < b, {c} and [d]", '```json\n{"a": 1}\n```\n'):
        assert read_in_all_ways(writer, writer.reply(said=text)) == [["say", text]]


THINKERS = {name: writer for name, writer in WRITERS.items() if writer.thoughts[0]}


@pytest.mark.parametrize("writer", THINKERS.values(), ids=THINKERS.keys())
def test_thoughts_are_distinguished(writer: Writer) -> None:
    found = read_in_all_ways(writer, writer.reply(thought="\nhm, <b>\n", said="It is dry."))
    assert found == [["think", "\nhm, <b>\n"], ["say", "It is dry."]]
    call = ("get_weather", {"city": "Oslo"})
    found = read_in_all_ways(writer, writer.reply(thought="rain?", calls=[call]))
    assert found == [["think", "rain?"], *called(call)]


@EVERY
def test_a_call_is_a_call(writer: Writer) -> None:
    for call in (("get_weather", {"city": "Oslo", "days": 2}), ("get_time", {})):
        assert read_in_all_ways(writer, writer.reply(calls=[call])) == called(call), call
        if writer.may_speak_first:
            found = read_in_all_ways(writer, writer.reply(said="Let me see.", calls=[call]))
            assert found == [["say", "Let me see."], *called(call)], call


@EVERY
def test_parallel_calls_come_one_by_one(writer: Writer) -> None:
    calls = [
        ("get_weather", {"city": "Oslo"}),
        ("get_time", {}),
        ("get_weather", {"city": "Bergen", "days": 1}),
    ]
    found = read_in_all_ways(writer, writer.reply(calls=calls))
    assert [event for event in found if event[0] != "say" or event[1].strip()] == called(*calls)


@EVERY
def test_an_argument_may_hold_anything(writer: Writer) -> None:
    for text in HOSTILE:
        calls = [("write_file", {"path": "a", "content": f"see {text} there"}), ("get_time", {})]
        found = read_in_all_ways(writer, writer.reply(calls=calls))
        said = [event for event in found if event[0] != "say" or event[1].strip()]
        assert said == called(*calls), text


@EVERY
def test_white_space_is_kept(writer: Writer) -> None:
    for text in ("    return 1\n", "\n\na\n", " ", "", "\t\n", "a\r\n"):
        call = ("write_file", {"path": " p ", "content": text})
        assert read_in_all_ways(writer, writer.reply(calls=[call])) == called(call), repr(text)


@EVERY
def test_values_are_what_the_schema_says(writer: Writer) -> None:
    for values in VALUES:
        call = ("set_values", values)
        assert read_in_all_ways(writer, writer.reply(calls=[call])) == called(call), values


@EVERY
def test_what_does_not_fit_is_malformed(writer: Writer) -> None:
    for call, problem in MISFITS:
        text = writer.reply(calls=[call])
        found = read_in_all_ways(writer, text)
        if found == [["say", text]] and call[0] == "get_money":
            continue  # nothing but the names on offer tells such calls from text
        assert len(found) == 1, call
        [[kind, raw, why]] = found
        assert kind == "malformed" and problem in why and raw.strip() in text and call[0] in raw


@EVERY
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_part_is_never_emitted_as_the_whole(writer: Writer, is_cut: bool) -> None:
    calls = [("write_file", {"path": "a/b", "content": "x = [1, 2]\n"}), ("get_weather", {"city": "Oslo"})]
    text = writer.reply(thought="hm" if writer.thoughts[0] else "", calls=calls)
    for stop in range(len(text)):
        found = events(read(writer.format, [text[:stop]], TOOLS, is_cut=is_cut))
        emitted = [event for event in found if event[0] in ("call", "repaired")]
        assert [event[1:] for event in emitted] == [list(call) for call in calls[: len(emitted)]], text[:stop]
