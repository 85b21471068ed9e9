"""Arguments are checked by their schema, at a bounded cost, whatever the schema is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from icehouse_server.text.values import validation
from icehouse_server.text.values.validation import ArgumentsCheck, TooCostly, property_schemas


def problem(schema: dict[str, Any], value: Any) -> str:
    return ArgumentsCheck(schema).problem(value)


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "str"},
        {"type": 7},
        {"enum": 3},
        {"pattern": "(["},
        {"minimum": "low"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "http://192.0.2.1/schema.json"},
        {"items": [{"type": "string"}]},
        {"required": True},
    ],
)
def test_a_keyword_that_is_written_wrongly_constrains_nothing(wrong: dict[str, Any]) -> None:
    schema = {"properties": {"a": wrong, "b": {"type": "null"}}}
    values: tuple[Any, ...] = ("x", 1, [1], {})
    for value in values:
        assert problem(schema, {"a": value}) == ""
    assert "argument b" in problem(schema, {"a": 1, "b": 1})


def doubling(depth: int) -> dict[str, Any]:
    """Return a schema that takes two to the power of its depth to look at."""
    names = [f"d{level}" for level in range(depth)]
    inner = {
        name: {"allOf": [{"$ref": f"#/$defs/{behind}"}] * 2} for name, behind in itertools.pairwise(names)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**inner, names[-1]: {"type": "object"}}}


def test_what_would_take_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "STEP_LIMIT", 1000)
    with pytest.raises(TooCostly, match="within 1000 steps"):
        problem(doubling(30), {})
    with pytest.raises(TooCostly, match="within 1000 steps"):
        problem({"properties": {"a": {"items": {"type": "integer"}}}}, {"a": [1] * 2000})
    with pytest.raises(TooCostly, match="nested too deep"):
        problem({"$ref": "#"}, {})
    with pytest.raises(TooCostly, match="searching for the pattern"):
        problem({"properties": {"a": {"pattern": "^(a|a)*$"}}}, {"a": "a" * 500 + "!"})


def test_what_is_said_of_one_property_is_found_through_references_and_unions() -> None:
    schema = {
        "$defs": {"base": {"properties": {"a": {"type": "integer"}}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"a": {"minimum": 3}}}],
        "anyOf": [{"properties": {"b": {"const": 1}}}, {"properties": {"b": {"const": "x"}}}],
        "patternProperties": {"^p": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    check = ArgumentsCheck(schema)

    def takes(name: str, value: Any) -> bool:
        return not check.problem(value, schema=property_schemas(check, schema, name))

    assert takes("p1", None) and not takes("p1", 1)
    assert takes("other", True) and not takes("other", 1)
    inner = {key: schema[key] for key in ("$defs", "allOf", "anyOf")}
    check = ArgumentsCheck(inner)
    schema = inner
    assert takes("a", 3) and not takes("a", 2) and not takes("a", "3")
    assert takes("b", 1) and takes("b", "x") and not takes("b", 2)
    assert property_schemas(check, inner, "c") == {}
