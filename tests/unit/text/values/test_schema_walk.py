"""A value without a type is what its schema says it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from icehouse_server.text.values.schema_walk import Argument, ArgumentsWalk

BOOL_NULL = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
INT_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
STRING_NULL = {"type": ["string", "null"]}


def read(schema: Any, text: str, *, is_python: bool = False) -> tuple[str, bool]:
    walk = ArgumentsWalk({"type": "object", "properties": {"x": schema}})
    value = walk.read(Argument("x", text), is_python=is_python)
    return value.json_text, value.is_repaired


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "string"}, "  a\n", '"  a\\n"'),
        (BOOL_NULL, "true", "true"),
        (BOOL_NULL, "null", "null"),
        (INT_NULL, "5", "5"),
        (INT_NULL, "null", "null"),
        (STRING_NULL, "123", '"123"'),
        (STRING_NULL, "True", '"True"'),
        (STRING_NULL, "null", "null"),
        (STRING_NULL, '{"a": [1]}', '"{\\"a\\": [1]}"'),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"type": ["integer", "string"]}, "5a", '"5a"'),
        ({"type": "integer"}, "9007199254740993", "9007199254740993"),
        ({"type": "integer"}, " -5 ", "-5"),
        ({"type": "number"}, "1.10", "1.10"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"enum": ["1", 2, None]}, "1", '"1"'),
        ({"enum": ["1", 2, None]}, "2", "2"),
        ({"enum": ["1", 2, None]}, "null", "null"),
        ({"const": "7"}, "7", '"7"'),
        ({"const": 7}, "7", "7"),
        ({"type": "integer", "nullable": True}, "null", "null"),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "array"}]}, '["a"]', '["a"]'),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", '"5"'),
        ({"type": "object"}, '{"a": 9007199254740993}', '{"a": 9007199254740993}'),
        ({}, "5", "5"),
        ({}, "5 apples", '"5 apples"'),
        ({}, "NaN", '"NaN"'),
    ],
)
def test_the_first_reading_that_fits_is_meant(schema: Any, text: str, expected: str) -> None:
    assert read(schema, text) == (expected, False)
    json.loads(expected)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "array"}, '["a",]', '["a"]'),
        ({"type": "object"}, '{"a": "b\nc"}', '{"a": "b\\nc"}'),
        ({"enum": ["on"]}, "\non\n", '"on"'),
    ],
)
def test_what_fits_only_once_repaired_says_so(schema: Any, text: str, expected: str) -> None:
    assert read(schema, text) == (expected, True)


def test_pythons_words_count_where_the_family_writes_them() -> None:
    assert read(BOOL_NULL, "True", is_python=True) == ("true", False)
    assert read(STRING_NULL, "None", is_python=True) == ("null", False)
    assert read({"type": "string"}, "None", is_python=True) == ('"None"', False)
    assert read(BOOL_NULL, "True") == ('"True"', False), "which the check then refuses"
    assert read({"type": "array"}, "['a', None]", is_python=True)[0] == '["a", null]'


def test_a_format_that_says_what_is_a_string_is_believed() -> None:
    walk = ArgumentsWalk({})
    assert walk.read(Argument("x", "5", is_text=True)).json_text == '"5"'
    assert walk.read(Argument("x", "5", is_text=False)).json_text == "5"
