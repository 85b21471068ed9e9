"""Arguments are checked by their schema, at a bounded cost, and a value without a type is what it says."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from icehouse_server.text.values import arguments
from icehouse_server.text.values.arguments import Argument, ArgumentsSchema, ValueTooCostly


def problem(schema: dict[str, Any], value: Any) -> str:
    return ArgumentsSchema(schema).problem(value)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"required": ["a"]}, {"a": 1}, {}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 2**70}, {"a": "1"}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1.0}, {"a": 1.5}),
        ({"properties": {"a": {"type": "boolean"}}}, {"a": True}, {"a": 1}),
        ({"properties": {"a": {"type": "string", "nullable": True}}}, {"a": None}, {"a": 1}),
        ({"properties": {"a": {"enum": [1, "b"]}}}, {"a": "b"}, {"a": True}),
        (
            {"properties": {"a": {"$ref": "#/$defs/x%20~1~0y"}}, "$defs": {"x /~y": {"const": 3}}},
            {"a": 3},
            {"a": 4},
        ),
        ({"properties": {"a": {"pattern": r"^\p{L}+$"}}}, {"a": "ü"}, {"a": "1"}),
        (
            {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
            {"xa": None},
            {"y": 1},
        ),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [1, "1"]}, {"a": [{"b": 1}, {"b": 1}]}),
        (
            {"properties": {"a": {"prefixItems": [{"type": "string"}], "items": False}}},
            {"a": ["b"]},
            {"a": ["b", 1]},
        ),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, {"a": 1}, {"b": 1}),
    ],
)
def test_it_says_what_does_not_fit(schema: dict[str, Any], good: Any, bad: Any) -> None:
    assert problem(schema, good) == ""
    assert problem(schema, bad)


INVALID = {
    "type: unknown name": {"type": "str"},
    "type: no name": {"type": 7},
    "enum: no list": {"enum": 3},
    "minimum: no number": {"minimum": "low"},
    "required: no list": {"required": True},
    "items: a list": {"items": [{"type": "string"}]},
    "properties: a list": {"properties": ["x"]},
    "multipleOf: zero": {"multipleOf": 0},
    "pattern: no regular expression": {"pattern": "(["},
    "patternProperties: no regular expression": {"patternProperties": {"([": {"type": "null"}}},
    "additionalProperties: no regular expression for re": {
        "patternProperties": {r"^\p{L}+$": {}},
        "additionalProperties": False,
    },
    "$ref: nowhere": {"$ref": "#/$defs/nowhere"},
    "$ref: no anchor": {"$ref": "#nowhere"},
    "$ref: another document": {"$ref": "http://192.0.2.1/schema.json"},
    "$ref: no URL": {"$ref": "http://["},
    "$ref: no text": {"$ref": 5},
    "$ref: to no schema": {"$ref": "#/$defs/number"},
    "$ref: through a number": {"$ref": "#/$defs/number/a"},
    "$ref: a name in a list": {"$ref": "#/$defs/list/a"},
}


@pytest.mark.parametrize("invalid", INVALID.values(), ids=INVALID)
def test_an_invalid_keyword_constrains_nothing(invalid: dict[str, Any]) -> None:
    definitions = {"number": 5, "list": [1]}
    schema = {"properties": {"a": invalid, "b": {"type": "null"}}, "$defs": definitions}
    values: tuple[Any, ...] = ("x", 1, 1.5, [1], {"x": 1})
    for value in values:
        assert problem(schema, {"a": value}) == ""
    assert "argument b" in problem(schema, {"a": 1, "b": 1})
    assert ArgumentsSchema({**invalid, "$defs": definitions}).of_property("none") == {}


def test_a_number_beyond_floats_constrains_no_float() -> None:
    assert problem({"properties": {"a": {"multipleOf": 10**400}}}, {"a": 1.5}) == ""


def test_a_reference_constrains_nothing_where_the_id_of_the_schema_is_no_url() -> None:
    schema = {"$id": "http://[", "properties": {"a": {"$ref": "b"}, "c": {"type": "null"}}}
    assert problem(schema, {"a": 1}) == "" and "argument c" in problem(schema, {"c": 1})
    assert ArgumentsSchema({"$id": "http://[", "$ref": "b"}).of_property("a") == {}


def test_an_invalid_id_of_the_schema_counts_as_absent() -> None:
    for invalid in (5, None, ["x"]):
        assert "argument b" in problem({"$id": invalid, "properties": {"b": {"type": "null"}}}, {"b": 1})


def doubling(depth: int) -> dict[str, Any]:
    """Return a schema that takes two to the power of its depth to look at."""
    names = [f"d{level}" for level in range(depth)]
    inner = {
        name: {"allOf": [{"$ref": f"#/$defs/{behind}"}] * 2} for name, behind in itertools.pairwise(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**inner, names[-1]: {"type": "object"}}}


def test_what_would_take_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "STEP_LIMIT", 1000)
    with pytest.raises(ValueTooCostly, match="within 1000 steps"):
        problem(doubling(30), {})
    with pytest.raises(ValueTooCostly, match="within 1000 steps"):
        problem({"properties": {"a": {"items": {"type": "integer"}}}}, {"a": [1] * 2000})
    with pytest.raises(ValueTooCostly, match="nested too deeply"):
        problem({"$ref": "#"}, {})
    with pytest.raises(ValueTooCostly, match="searching for the pattern"):
        problem({"properties": {"a": {"pattern": "^(a|a)*$"}}}, {"a": "a" * 500 + "!"})


@pytest.mark.parametrize("keyword", ["additionalProperties", "unevaluatedProperties"])
def test_a_costly_pattern_of_names_is_given_up_whatever_keyword_uses_it(keyword: str) -> None:
    schema = {keyword: False, "patternProperties": {"^(a|a)*$": {}}}
    name = "a" * 22 + "!"
    with pytest.raises(ValueTooCostly, match="searching for the pattern"):
        problem(schema, {name: 1})
    assert ArgumentsSchema(schema).of_property(name) == {}


def test_what_is_said_of_one_property_is_found_through_references_and_unions() -> None:
    schema = {
        "$defs": {"base": {"properties": {"a": {"type": "integer"}}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"a": {"minimum": 3}}}],
        "anyOf": [{"properties": {"b": {"const": 1}}}, {"properties": {"b": {"const": "x"}}}],
        "patternProperties": {"^p": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    check = ArgumentsSchema(schema)

    def takes(name: str, value: Any) -> bool:
        return not check.problem(value, schema=check.of_property(name))

    assert takes("p1", None) and not takes("p1", 1)
    assert takes("other", True) and not takes("other", 1)
    inner = {key: schema[key] for key in ("$defs", "allOf", "anyOf")}
    check = ArgumentsSchema(inner)
    assert takes("a", 3) and not takes("a", 2) and not takes("a", "3")
    assert takes("b", 1) and takes("b", "x") and not takes("b", 2)
    assert check.of_property("c") == {}


BOOL_NULL = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
INT_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
STRING_NULL = {"type": ["string", "null"]}


def read(schema: Any, text: str, *, is_python: bool = False) -> tuple[str, bool]:
    arguments_schema = ArgumentsSchema({"type": "object", "properties": {"x": schema}})
    value = arguments_schema.read(Argument("x", text), is_python=is_python)
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
    schema = ArgumentsSchema({})
    assert schema.read(Argument("x", "5", is_text=True)).json_text == '"5"'
    assert schema.read(Argument("x", "5", is_text=False)).json_text == "5"
