"""Schemas as a grammar can keep them: what is said in other words, what is left out, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from icehouse_server.structured_output.schema.references import UnusableSchema
from icehouse_server.structured_output.schema.rewriter import rewritten

from tests.fixtures.schemas.held import held

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
TAG_A = {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "null"}}, "required": ["k"]}
TAG_B = {
    "type": "object",
    "properties": {"k": {"enum": ["b", "c"]}, "y": {"type": "null"}},
    "required": ["k"],
}
NODE = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
FREE = {"additionalProperties": True}
NAMED = {"$id": "https://x.example/s", "$defs": {"A": A}}
ALIKE = {
    "type": "array",
    "prefixItems": [{"$ref": "#/$defs/n"}, {"$ref": "#/definitions/n"}],
    "$defs": {"n": {"type": "null"}},
    "definitions": {"n": {"type": "integer"}},
}

TAKEN: list[tuple[str, Any, list[str], list[str]]] = [
    # Objects have no properties but those that the schema names.
    ("closed", A, ['{"a": 1}'], ['{"a": 1, "z": 1}', '{"z": 1}']),
    ("open", {**A, **FREE}, ['{"a": 1, "z": 1}'], ['{"a": "x"}']),
    ("free", {"type": "object"}, ["{}", '{"z": {"y": 1}}'], ["[]"]),
    ("nothing named", {"type": "object", "properties": {}}, ["{}"], ['{"z": 1}']),
    ("typeless", {"properties": {"a": {"type": "null"}}}, ["3", '{"a": null}'], ['{"z": 1}']),
    ("required alone", {**A, "required": ["a", "z"]}, ['{"a": 1, "z": []}'], ['{"a": 1}']),
    (
        "patterns",
        {"patternProperties": {"^x": {"type": "null"}}},
        ['{"xy": null}'],
        ['{"y": null}', '{"x": 1}'],
    ),
    ("inner", {"items": {"allOf": [A]}}, ['[{"a": 1}]'], ['[{"a": 1, "z": 1}]']),
    ("all", {"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "z": 3}']),
    ("all, one open", {"allOf": [A, {**B, **FREE}]}, ['{"a": 1, "b": 2, "z": 3}'], ['{"a": 1}']),
    ("all and own", {**A, "allOf": [B]}, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "z": 3}']),
    ("one of them", {"anyOf": [A, B]}, ['{"a": 1}', '{"b": 2}'], ['{"a": 1, "b": 2}', '{"z": 1}']),
    (
        "one of them and own",
        {**A, "anyOf": [B, {"required": ["c"]}]},
        ['{"a": 1, "b": 2}', '{"a": 1, "c": 2}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}', '{"a": 1, "b": 2, "z": 3}'],
    ),
    (
        "extended and alone",
        {
            "properties": {"p": {"$ref": "#/$defs/A"}, "q": {"allOf": [{"$ref": "#/$defs/A"}, B]}},
            "$defs": {"A": A},
        },
        ['{"p": {"a": 1}, "q": {"a": 1, "b": 2}}'],
        ['{"p": {"a": 1, "b": 2}}', '{"q": {"a": 1, "b": 2, "z": 3}}'],
    ),
    ("recursive", {"$ref": "#/$defs/N", "$defs": {"N": NODE}}, ['{"n": {"n": {}}}'], ['{"n": {"z": 1}}']),
    (
        "recursive by pydantic 2.8",
        {"type": "object", "properties": {"n": {"allOf": [{"$ref": "#"}], "default": {}, "title": "N"}}},
        ['{"n": {"n": {}}}'],
        ['{"n": {"z": 1}}'],
    ),
    ("nullable", {"type": ["string", "null"], "format": "uuid4"}, ["null"], ['"a"']),
    # What was evaluated nowhere.
    ("unevaluated", {**A, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "z": 1}']),
    (
        "unevaluated of all",
        {"allOf": [A, {**B, "additionalProperties": {}}], "unevaluatedProperties": False},
        ['{"a": 1, "b": 2, "z": 3}'],
        ['{"a": 1}'],
    ),
    (
        "unevaluated in all",
        {"allOf": [{**A, "unevaluatedProperties": False}, {"type": "object"}]},
        ['{"a": 1}'],
        ['{"a": 1, "z": 1}'],
    ),
    ("unevaluated of a type", {**A, "unevaluatedProperties": {"type": "null"}}, ['{"a": 1, "z": null}'], []),
    (
        "unevaluated by a reference",
        {"$ref": "#/$defs/A", **{k: B[k] for k in ("properties", "required")}, "unevaluatedProperties": False}
        | {"$defs": {"A": A}},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "b": 2, "z": 3}'],
    ),
    ("unevaluated all", {"allOf": [True], "unevaluatedProperties": False}, ["{}", "1"], ['{"z": 1}']),
    ("unevaluated either", {"anyOf": [A, True], "unevaluatedProperties": False}, ['{"a": 1}'], ['{"z": 1}']),
    (
        "unevaluated but required",
        {"anyOf": [A, {"type": "null"}], "required": ["z"], "unevaluatedProperties": False},
        ["null"],
        ['{"a": 1, "z": 1}', '{"a": 1}'],
    ),
    (
        "unevaluated items",
        {"prefixItems": [A], "unevaluatedItems": False, "type": "array"},
        ["[]"],
        ["[{}, 1]"],
    ),
    (
        "unevaluated within one",
        {"allOf": [{"anyOf": [A, B]}], "unevaluatedProperties": False},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', '{"a": 1, "z": 1}'],
    ),
    # Alternatives of which no two can match.
    ("tags", {"oneOf": [TAG_A, TAG_B]}, ['{"k": "a"}', '{"k": "c", "y": null}'], ['{"k": "a", "y": null}']),
    (
        "tags by reference",
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": TAG_A, "B": TAG_B}},
        ['{"k": "b"}'],
        ['{"k": "d"}'],
    ),
    ("types", {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": A}}, ["null"], ["1"]),
    ("lacking", {"oneOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
    (
        "both kinds",
        {"oneOf": [TAG_A, TAG_B], "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
        ['{"k": "a", "x": null}'],
        ['{"k": "a"}', '{"k": "d", "x": null}', '{"k": "a", "x": null, "z": 1}'],
    ),
    # Names of properties.
    ("names of a pattern", {"propertyNames": {"pattern": "^x"}}, ['{"x": 1}', "1"], ['{"y": 1}']),
    ("any name", {"propertyNames": {"type": "string"}}, ['{"y": 1}'], []),
    ("no name", {"type": "object", "propertyNames": False}, ["{}"], ['{"y": 1}']),
    (
        "names by reference",
        {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": A, "$defs": {"n": {"const": "x"}}},
        ['{"x": {"a": 1}}'],
        ['{"x": {}}', '{"y": {"a": 1}}'],
    ),
    (
        "names and properties",
        {**A, "properties": {"a": {}, "b": {}}, "propertyNames": {"enum": ["a", "c"]}},
        ['{"a": 1}', '{"a": 1, "c": 2}'],
        ['{"a": 1, "b": 2}'],
    ),
    (
        "names of either kind",
        {"propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^x$"}, {"maxLength": 0}]}},
        ['{"a": 1, "x": 2}', '{"": 1}'],
        ['{"xx": 1}', '{"b": 1}'],
    ),
    # References as libraries spell them.
    ("with a space", {"$ref": "#/$defs/A B", "$defs": {"A B": A}}, ['{"a": 1}'], ["{}"]),
    ("encoded", {"$ref": "#/$defs/A%20%C3%A9~1", "$defs": {"A é/": A}}, ['{"a": 1}'], ["{}"]),
    (
        "anywhere",
        {"properties": {"p": A, "q": {"$ref": "#/properties/p"}}},
        ['{"q": {"a": 1}}'],
        ['{"q": {}}'],
    ),
    ("by number", {"prefixItems": [A, {"$ref": "#/prefixItems/0"}]}, ['[{"a": 1}, {"a": 2}]'], ["[{}]"]),
    ("by anchor", {"$ref": "#A", "$defs": {"x": {**A, "$anchor": "A"}}}, ['{"a": 1}'], ["{}"]),
    ("by its own name", {**NAMED, "$ref": "https://x.example/s#/$defs/A"}, ['{"a": 1}'], ["{}"]),
    ("names alike", ALIKE, ["[null, 1]"], ["[1, 1]", "[null, null]"]),
    # Older drafts.
    (
        "tuple",
        {"items": [{"type": "null"}], "additionalItems": False, "type": "array"},
        ["[null]"],
        ["[null, 1]"],
    ),
    ("exclusive", {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    # Keywords that say nothing here.
    ("idle", {"type": "null", "if": {}, "contains": {}, "minContains": 0, "not": False}, ["null"], ["1"]),
    (
        "of others",
        {"type": "null", "discriminator": {}, "x-y": 1, "nullable": 3, "deprecated": True},
        ["null"],
        [],
    ),
    ("in data", {"enum": [{"$ref": "#/none", "not": {}}]}, ['{"$ref": "#/none", "not": {}}'], []),
    ("never", {"properties": {"a": {"not": {}}}, "type": "object"}, ["{}"], ['{"a": 1}']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN])
def test_a_schema_takes_what_it_says_and_nothing_else(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = held(schema)
    assert [text for text in good if not grammar.takes(text)] == []
    assert [text for text in bad if grammar.takes(text)] == []


REFUSED: list[tuple[Any, str, str]] = [
    (
        {"anyOf": [A, {"propertyNames": {"enum": ["a"]}}], "unevaluatedProperties": False},
        "/anyOf/1",
        "propertyNames",
    ),
    ({"properties": {"a/b": {"not": {"type": "null"}}}}, "/properties/a~1b/not", "not"),
    ({"if": A, "then": B}, "/if", "if"),
    ({"items": {"contains": A}}, "/items/contains", "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", "dependentRequired"),
    ({"dependentSchemas": {"a": B}}, "/dependentSchemas", "dependentSchemas"),
    ({"$dynamicRef": "#a"}, "/$dynamicRef", "dynamicRef"),
    (
        {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [{"not": A}]}}},
        "/$defs/x/allOf/0/not",
        "not",
    ),
    ({"allOf": [A], "unevaluatedProperties": A}, "/unevaluatedProperties", "true or false"),
    (
        {"allOf": [{"anyOf": [A, B]}, A], "unevaluatedProperties": False},
        "/",
        "alternatives",
    ),
    ({"allOf": [A], "unevaluatedItems": False}, "/unevaluatedItems", "unevaluatedItems"),
    ({"items": [{"pattern": "a(?!b)"}]}, "/items/0/pattern", "looks ahead"),
    ({"propertyNames": {"pattern": "a", "maxLength": 1}}, "/propertyNames", "names"),
    ({"propertyNames": {"type": "integer"}}, "/propertyNames/type", "string"),
    ({**A, "propertyNames": {"pattern": "a"}}, "/propertyNames", "names"),
    (
        {"allOf": [A], "propertyNames": {"enum": ["a"]}, "unevaluatedProperties": False},
        "/propertyNames",
        "beside other names",
    ),
    ({"patternProperties": {"a": A}, "propertyNames": {"enum": ["a"]}}, "/propertyNames", "names"),
    ({"items": {"$ref": "#/$defs/none"}}, "/items/$ref", "#/$defs/none points to no schema"),
    ({"$ref": "#none"}, "/$ref", "points to no schema"),
    ({"$ref": "#/enum", "enum": [1]}, "/$ref", "points to no schema"),
    ({"$ref": "#/enum/07", "enum": [1]}, "/$ref", "points to no schema"),
    ({"$ref": "other.json#/a"}, "/$ref", "another document"),
    ({"$ref": "file:///etc/passwd"}, "/$ref", "another document"),
    ({"$ref": ["#"]}, "/$ref", "string"),
    ({"items": {"allOf": None}}, "/items/allOf", "must be a list of schemas"),
    ({"properties": [A]}, "/properties", "must be an object of schemas"),
]


@pytest.mark.parametrize(("schema", "place", "detail"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_kept_to_is_refused_with_its_place(schema: Any, place: str, detail: str) -> None:
    with pytest.raises(UnusableSchema, match=detail.replace("$", r"\$")) as refused:
        rewritten(schema)
    assert refused.value.position == place


def test_what_outputs_are_not_held_to_is_reported() -> None:
    schema = {
        "properties": {
            "s": {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "color"}},
            "t": {"type": "array", "uniqueItems": False},
            "n": {"type": "number", "minimum": -1e30, "maximum": 1e30},
            "k": {"propertyNames": {"format": "uri", "minLength": 1}},
        }
    }
    found = rewritten(schema)
    assert found.unenforced == (
        "/properties/s/uniqueItems",
        "/properties/s/items/format",
        "/properties/n/minimum",
        "/properties/n/maximum",
        "/properties/k/propertyNames/format",
    )
    assert held(schema).takes('{"s": ["a", "a"], "n": 5}')
    assert rewritten(A).unenforced == ()


def test_a_bound_that_only_huge_numbers_meet_is_kept() -> None:
    assert rewritten({"type": "number", "minimum": 1e30}).schema == {"type": "number", "minimum": 1e30}


def test_the_order_of_properties_stays() -> None:
    schema = {
        "required": ["b"],
        "additionalProperties": False,
        "properties": {"b": True, "a": True},
        "type": "object",
    }
    grammar = held(schema)
    assert grammar.takes('{"b": 1, "a": 2}') and not grammar.takes('{"a": 2, "b": 1}')


def test_a_schema_is_left_as_it_was() -> None:
    schema = {
        "allOf": [A, {"propertyNames": {"enum": ["a"]}, "additionalProperties": B}],
        "oneOf": [TAG_A, TAG_B],
    }
    before = json.dumps(schema)
    rewritten(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("keyword", ["items", "additionalProperties", "allOf", "propertyNames"])
def test_schemas_nested_too_deeply_are_refused(keyword: str) -> None:
    def nested(levels: int) -> Any:
        schema: Any = {"enum": ["a"]} if keyword == "propertyNames" else {"type": "integer"}
        for _ in range(levels):
            schema = {keyword: [schema] if keyword == "allOf" else schema}
        return {"anyOf": [schema]} if keyword == "propertyNames" else schema

    assert rewritten(nested(100 if keyword != "propertyNames" else 0)).schema
    with pytest.raises(UnusableSchema):
        rewritten(nested(400))


def test_a_schema_that_grows_without_end_is_refused() -> None:
    # Each alternative is closed with other names, and so is what it refers to, and so on.
    definitions: dict[str, Any] = {
        f"d{i}": {
            "anyOf": [
                {"properties": {f"p{i}{j}": True}, "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for j in range(4)
            ]
        }
        for i in range(12)
    }
    definitions["d12"] = A
    with pytest.raises(UnusableSchema, match="more than 50000 schemas"):
        rewritten({"$ref": "#/$defs/d0", "$defs": definitions})


def test_many_alternatives_beside_many_properties_are_refused() -> None:
    names = {f"p{i}": True for i in range(1000)}
    assert rewritten({"properties": names, "anyOf": [{"required": ["p1"]}] * 20}).schema
    with pytest.raises(UnusableSchema, match="more than 50000"):
        rewritten({"properties": names, "anyOf": [{"required": ["p1"]}] * 1000})


def test_many_names_of_one_large_value_cost_its_size_once() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(6):
        names = {"enum": [f"n{i}" for i in range(40)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    assert len(json.dumps(rewritten(schema).schema)) < 40_000
    assert held(schema).takes('{"n1": {"n2": {"n3": {"n4": {"n5": {"n6": 7}}}}}}')


def test_many_tagged_alternatives_are_distinguished_by_their_tag() -> None:
    options = [{**TAG_A, "properties": {"k": {"const": f"c{i}"}}} for i in range(300)]
    assert "anyOf" in rewritten({"oneOf": options}).schema
    with pytest.raises(UnusableSchema, match="use anyOf"):
        rewritten({"oneOf": [*options, {**TAG_A, "properties": {"k": {"const": "c7"}}}]})


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}, A]}])
def test_a_schema_that_is_itself_comes_to_an_end(schema: Any) -> None:
    assert rewritten(schema).schema


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [A, {**B, **FREE}]},
        {"oneOf": [A, True]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [A, {"$ref": "#/oneOf/0"}]},
        # Beside a part that names `b`, the first one may have it.
        {"properties": {"a": True, "b": True}, "oneOf": [A, B]},
        {"allOf": [{"oneOf": [A, B]}, {}]},
    ],
    ids=str,
)
def test_alternatives_that_may_overlap_are_refused(schema: Any) -> None:
    with pytest.raises(UnusableSchema, match="use anyOf") as refused:
        rewritten(schema)
    assert refused.value.position.endswith("/oneOf")
