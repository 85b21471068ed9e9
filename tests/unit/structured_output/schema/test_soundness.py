"""Random schemas: whatever the server's grammar takes validates against the caller's own schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from icehouse_server.structured_output.schema.references import UnusableSchema
from icehouse_server.structured_output.schema.rewriter import rewritten
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from tests.fixtures.schemas.held import held

_NAMES = ("a", "b", "x y")
_LEAVES: list[Any] = [True, {"type": "integer"}, {"const": 1}, {"enum": ["s", None]}, {"type": "null"}]
_VALUES: list[Any] = [1, 2, "s", None, {}, {"a": 1}]
VALUES: list[Any] = [
    *_VALUES,
    [],
    [1],
    ["s", 1],
    *(
        dict(zip(names, values, strict=True))
        for count in (1, 2, 3)
        for names in itertools.combinations(_NAMES, count)
        for values in itertools.product([1, "s", None, {"a": 1}][: 5 - count], repeat=count)
    ),
]


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    schema: dict[str, Any] = draw(st.sampled_from([{}, {"type": "object"}, {"type": ["object", "null"]}]))
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=2))
    parts: dict[str, st.SearchStrategy[Any]] = {
        "properties": st.fixed_dictionaries(dict.fromkeys(names, inner)),
        "required": st.just(names[:1]),
        "additionalProperties": st.sampled_from([False, True, {"type": "integer"}]),
        "unevaluatedProperties": st.sampled_from([False, False, True, {"type": "null"}]),
        "patternProperties": st.just({"^x": {"type": "integer"}}),
        "propertyNames": st.sampled_from(
            [{"enum": ["a", "x y"]}, {"pattern": "^[ax]"}, {"maxLength": 1}, True]
        ),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/d", "#/$defs/e%20f"]),
        "not": st.sampled_from([False, {}]),
    }
    chosen = draw(st.lists(st.sampled_from(list(parts)), unique=True, min_size=1, max_size=4))
    return {**schema, **{keyword: draw(parts[keyword]) for keyword in chosen}}


def _schemas() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(_LEAVES)
    shared = _objects(leaves)
    whole = _objects(st.recursive(leaves, _objects, max_leaves=4))
    return st.builds(lambda schema, d, e: {**schema, "$defs": {"d": d, "e f": e}}, whole, shared, shared)


@given(_schemas())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
def test_what_a_grammar_takes_validates_against_the_schema(schema: Any) -> None:
    try:
        new = rewritten(schema)
    except UnusableSchema as error:
        event(f"refused: {error.detail[:30]}")
        assert error.position.startswith("/")
        return
    assert new.unenforced == ()
    try:
        grammar = held(schema)
    except AssertionError as error:
        event(f"llguidance: {str(error)[:30]}")
        return
    taken = [value for value in VALUES if grammar.takes(json.dumps(value))]
    event(f"takes {min(len(taken), 3)}")
    validator = Draft202012Validator(schema)
    assert [value for value in taken if not validator.is_valid(value)] == []


_KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("propertyNames", "allOf", "anyOf", "oneOf", "not", "$ref", "items", "prefixItems", "additionalItems"),
    *(
        "unevaluatedItems",
        "contains",
        "minContains",
        "if",
        "then",
        "enum",
        "const",
        "format",
        "pattern",
        "$id",
    ),
    *(
        "minLength",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
        "uniqueItems",
        "$anchor",
        "$defs",
        "dependencies",
    ),
)
_JUNK = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 2.5, 1e30, "", "a", "#", "#/$defs/a", "object", "uuid", "^(?=a)b", "("]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(_KEYWORDS), _JUNK, max_size=6))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_no_schema_is_refused_or_left_to_llguidance(schema: Any) -> None:
    try:
        new = rewritten(schema)
    except UnusableSchema as error:
        assert error.position.startswith("/") and error.detail
        return
    source = LLMatcher.grammar_from_json_schema(json.dumps(new.schema))
    message = LLMatcher(LLTokenizer("byte"), source, log_level=0).get_error()
    event("refused" if message else "taken")
