"""White space of JSON in grammars: every usual layout is taken, and no run of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from icehouse_server.domain.response_format import JsonObject, JsonSchema, JsonTag, TaggedJson
from icehouse_server.structured_output.grammar_source import UNENFORCED_LIMIT, unenforced

from tests.fixtures.schemas.held import TAG, Held, held, held_call

ANY_OBJECT = {"type": "object"}
NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["n"],
}
GRAMMARS: dict[str, Callable[[], Held]] = {
    "schema": lambda: held(NODE),
    "any object": lambda: Held(JsonObject()),
    "call": lambda: held_call(NODE),
    "call of any arguments": lambda: held_call(ANY_OBJECT),
}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    {"indent": 2},
    {"indent": 4},
    {"indent": "\t"},
]
each_grammar = pytest.mark.parametrize("kind", GRAMMARS)


def nested(levels: int) -> Any:
    """Return objects within each other, as many levels as said."""
    value: Any = {"n": levels}
    for level in range(1, levels):
        value = {"n": level, "next": value}
    return value


def takes(kind: str, text: str) -> bool:
    return GRAMMARS[kind]().takes(text.join(TAG) if kind.startswith("call") else text)


@each_grammar
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("levels", [1, 3, 8])
def test_json_may_be_laid_out_as_usual(kind: str, layout: dict[str, Any], levels: int) -> None:
    assert takes(kind, json.dumps(nested(levels), **layout))


@each_grammar
@pytest.mark.parametrize("levels", [1, 2, 8])
@pytest.mark.parametrize(
    "space", ["  ", "\n\n", "\n\n\n", " \n", "\n" + " " * 33, "\t", "\r\n" * 2, " " * 200]
)
def test_white_space_does_not_go_on_and_on(kind: str, levels: int, space: str) -> None:
    text = json.dumps(nested(levels))
    innermost = text.rindex("{")
    places = [index for index in range(innermost, len(text)) if text[index] in "{:}"]
    # Right behind the last brace the JSON is over.
    for place in [innermost, *places[:-levels]]:
        assert takes(kind, text[: place + 1] + " " + text[place + 1 :].lstrip())
        assert not takes(kind, text[: place + 1] + space + text[place + 1 :].lstrip())


def test_lists_have_bounded_white_space_too() -> None:
    grammar = Held(JsonObject())
    assert grammar.takes('{"a" : [ 1 , [\n  2\n] ]}')
    for text in (
        '{"a": [  1]}',
        '{"a": [1  ]}',
        '{"a": [1,\n\n2]}',
        '{"a": [[ \n1]]}',
        '{"a": []  }',
        ' {"a": 1}',
    ):
        assert not grammar.takes(text), text


def test_a_compact_output_has_none() -> None:
    for grammar in (held(NODE, is_compact=True), Held(JsonObject(is_compact=True))):
        assert grammar.takes('{"n":1}') and not grammar.takes('{"n": 1}')


def test_what_is_not_enforced_is_reported_with_its_field_and_only_so_much_of_it() -> None:
    plain, tool = {"uniqueItems": True}, {"properties": {"é/" * 300: {"uniqueItems": True}}}
    assert unenforced(JsonObject()) == unenforced(JsonSchema("true")) == ()
    assert unenforced(JsonSchema(json.dumps(plain))) == ("/uniqueItems",)
    tags = (
        JsonTag("a", json.dumps(plain), field="prompt.tools[3].parameters_json"),
        JsonTag("b", json.dumps(tool)),
    )
    first, second = unenforced(TaggedJson(tags))
    assert first == "prompt.tools[3].parameters_json/uniqueItems"
    assert len(second) == 256 and second.startswith("…") and second.endswith("/uniqueItems")
    many = {"prefixItems": [plain] * (UNENFORCED_LIMIT + 1)}
    assert len(unenforced(JsonSchema(json.dumps(many)))) == UNENFORCED_LIMIT


def test_a_schema_cannot_change_how_it_is_read() -> None:
    grammar = held({**NODE, "x-guidance": {"whitespace_flexible": True, "lenient": True}})
    assert not grammar.takes('{"n":  1}') and not grammar.takes('{"m": 1}')
