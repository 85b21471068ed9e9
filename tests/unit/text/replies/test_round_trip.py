"""Any valid arguments of any schema, written as a family writes them, are read back, or reported as malformed
where the text of one looks like structure; never as something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.chat import Tool

from tests.fixtures.chat.notations import WRITERS, Writer
from tests.fixtures.chat.reply_pieces import cut_at, events, read

Sample = tuple[dict[str, Any], Any]
"""A schema and a value that fits it."""

MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</invoke>",
    "</param>",
    "</longcat_arg_value>",
    "</｜DSML｜parameter>",
    "<|close|>argument<|sep|>",
    "</atem:parameter>",
    "[TOOL_CALLS]",
    "<|call|>",
    ">>>",
    "```",
    '"',
    "'",
    "\\",
    "\n",
    ")]",
    "}",
)
NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
STRINGS = st.lists(st.one_of(PLAIN, st.sampled_from(MARKUP)), max_size=4).map("".join)
INTEGERS = st.one_of(st.integers(-9, 9), st.integers(-(2**70), 2**70))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def is_unlike_json(text: str) -> bool:
    """Whether a text can mean nothing but itself where other types fit as well."""
    try:
        json.loads(text.strip())
    except ValueError:
        return text.strip() not in ("True", "False", "None")
    return False


LEAVES = st.one_of(
    STRINGS.map(lambda value: ({"type": "string"}, value)),
    INTEGERS.map(lambda value: ({"type": "integer"}, value)),
    FLOATS.map(lambda value: ({"type": "number"}, value)),
    st.booleans().map(lambda value: ({"type": "boolean"}, value)),
    st.just(({"type": "null"}, None)),
    INTEGERS.map(lambda value: ({"const": value}, value)),
    st.sampled_from(["on", "off", "5"]).map(lambda value: ({"enum": ["on", "off", "5"]}, value)),
    st.sampled_from([None, "s"]).map(lambda value: ({"type": ["string", "null"]}, value)),
    STRINGS.filter(is_unlike_json).map(lambda value: ({"type": ["null", "string", "object"]}, value)),
    INTEGERS.map(lambda value: ({"anyOf": [{"type": "string", "maxLength": 0}, {"type": "integer"}]}, value)),
    STRINGS.filter(is_unlike_json).map(lambda value: ({}, value)),
    INTEGERS.map(lambda value: ({"type": "integer", "nullable": True}, value)),
)


def containers(inner: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
    def array(samples: list[Sample]) -> Sample:
        return {"type": "array", "items": {"anyOf": [schema for schema, _ in samples] or [{}]}}, [
            value for _, value in samples
        ]

    return st.one_of(
        st.lists(inner, max_size=3).map(array), st.dictionaries(NAMES, inner, max_size=3).map(whole)
    )


def whole(samples: dict[str, Sample]) -> Sample:
    """Return an object's schema and value."""
    properties = {name: schema for name, (schema, _) in samples.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema, {name: value for name, (_, value) in samples.items()}


SAMPLES = st.dictionaries(NAMES, st.recursive(LEAVES, containers, max_leaves=5), max_size=4).map(whole)


def texts_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for member in members for text in texts_of(member)]


def check(writer: Writer, sample: Sample, places: list[int]) -> None:
    schema, value = sample
    tools = [Tool("f_g", "", schema)]
    text = writer.reply(calls=[("f_g", value)])
    found = events(read(writer.format, cut_at(text, places), tools))
    assert found == events(read(writer.format, [text], tools))
    if found == [["call", "f_g", value]]:
        return
    texts = texts_of(value)
    family = writer.family
    if family.name in ("function-gemma", "gemma4"):
        assert any("<" in text or "|" in text for text in texts)
        return
    assert not writer.is_typed or family.name in ("deepseek-tags", "kimi-tags")
    assert any(mark in text for text in texts for mark in MARKUP if len(mark) > 5)
    assert any(event[0] == "malformed" for event in found), (text, found)


EVERY = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
PLACES = st.lists(st.integers(0, 10_000), max_size=6)


@EVERY
@settings(max_examples=30, deadline=None)
@given(sample=SAMPLES, places=PLACES)
def test_arguments_are_read_back(writer: Writer, sample: Sample, places: list[int]) -> None:
    check(writer, sample, places)


@pytest.mark.slow
@EVERY
@settings(max_examples=10_000, deadline=None)
@given(sample=SAMPLES, places=PLACES)
def test_ten_thousand_arguments_are_read_back(writer: Writer, sample: Sample, places: list[int]) -> None:
    check(writer, sample, places)
