"""Random JSON schemas of the keywords that can be kept to, small enough to be satisfied by chance."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_NAMES = ("a", "b", "é", 'q"\\', "long name", "x/y~z")

Schema = dict[str, Any]


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    lengths = {"minLength": draw(st.integers(0, 3)), "maxLength": draw(st.integers(3, 8))}
    variants: list[Schema] = [
        lengths,
        {"pattern": draw(st.sampled_from(["^[a-c]{1,4}$", "^(é|🧊)+x$", "^\\d{2}-\\d{2}$"]))},
        {"format": draw(st.sampled_from(["uuid", "ipv4"]))},
        {"enum": ["red", 'quo"te', "\n", "🧊"]},
    ]
    return {"type": "string", **draw(st.sampled_from(variants))}


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-300, 300))
    bounds = {"minimum": low, "maximum": low + draw(st.integers(7, 500))}
    strict = {"exclusiveMinimum": low, "exclusiveMaximum": low + draw(st.integers(8, 500))}
    kind = draw(st.sampled_from(["integer", "number"]))
    multiple = {"multipleOf": draw(st.sampled_from([1, 2, 7]))} if kind == "integer" else {}
    return {"type": kind, **draw(st.sampled_from([bounds, strict])), **draw(st.sampled_from([{}, multiple]))}


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    plain = st.builds(
        lambda item, least, more: {
            "type": "array",
            "items": item,
            "minItems": least,
            "maxItems": least + more,
        },
        items,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.builds(
        lambda first, rest: {
            "type": "array",
            "prefixItems": first,
            "items": rest,
            "maxItems": len(first) + 1,
        },
        st.lists(items, min_size=1, max_size=2),
        items | st.just(False),
    )
    return plain | tuples


@st.composite
def _objects(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=3, unique=True))
    required = [name for name in names if draw(st.booleans())]
    schema: Schema = {
        "type": "object",
        "properties": {name: draw(items) for name in names},
        "required": required,
        "additionalProperties": draw(
            st.sampled_from([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
        ),
    }
    if schema["additionalProperties"] and draw(st.booleans()):
        schema["maxProperties"] = len(required) + 2
        schema["minProperties"] = draw(st.integers(0, 2))
    return schema


def schemas() -> st.SearchStrategy[Schema]:
    """Return a strategy of schemas up to a few levels deep."""
    leaves = st.one_of(
        _strings(),
        _numbers(),
        st.just({"type": "boolean"}),
        st.just({"const": {"k": [1, "x", None]}}),
        st.just({"type": ["null", "boolean"]}),
        st.just({"enum": [1, "1", True, None, [2]]}),
        st.just({"$ref": "#/$defs/d"}),
    )
    whole = st.recursive(
        leaves,
        lambda inner: st.one_of(
            _arrays(inner),
            _objects(inner),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
        ),
        max_leaves=4,
    )
    return st.builds(
        lambda schema, shared: {**schema, "$defs": {"d": shared}}, whole, _strings() | _numbers()
    )
