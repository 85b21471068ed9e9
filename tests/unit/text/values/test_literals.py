"""JSON as models write it comes out valid, at once where it can, and repaired where that is unambiguous."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.text.values.literals import JsonText, ReadValue, strict, tolerant
from icehouse_server.text.values.text_source import Malformed, TextSource

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


def emitted_in_pieces(text: str, size: int) -> list[str]:
    """Return what is emitted with each piece."""
    source = TextSource()
    emitted: list[str] = []
    reading = JsonText(source).value(emitted.append)
    counts = []
    for start in range(0, len(text), size):
        source.push(text[start : start + size])
        next(reading, None)
        counts.append("".join(emitted))
    source.end()
    next(reading, None)
    return [*counts, "".join(emitted)]


@given(value=VALUES, indent=st.sampled_from([None, 0, 2]), size=st.integers(1, 9))
def test_what_is_valid_comes_out_as_it_is(value: Any, indent: int | None, size: int) -> None:
    text = json.dumps(value, indent=indent)
    assert tolerant(text) == ReadValue(text)
    emitted = emitted_in_pieces(text, size)
    assert emitted[-1] == text and all(text.startswith(part) for part in emitted)


def test_it_is_emitted_as_it_arrives() -> None:
    assert emitted_in_pieces('{"a": "bc", "d": [1, 2]}', 4)[:3] == ['{"a"', '{"a": "b', '{"a": "bc"']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "b\nc\t"}', '{"a": "b\\nc\\t"}'),
        ('{"a": 1,}', '{"a": 1}'),
        ("[1, 2 , ]", "[1, 2  ]"),
        ('"it\\\'s"', '"it\'s"'),
    ],
)
def test_what_is_unambiguous_is_repaired(text: str, expected: str) -> None:
    assert tolerant(text) == ReadValue(expected, is_repaired=True)
    for size in (1, 2, 3):
        assert emitted_in_pieces(text, size)[-1] == expected


def test_brackets_are_closed_where_the_end_follows() -> None:
    source = TextSource('{"a": [1, {"b": "c"</end>', has_ended=True)
    emitted: list[str] = []
    reader = JsonText(source, ("</end>",))
    list(reader.value(emitted.append))
    assert ("".join(emitted), reader.is_repaired, source.rest) == ('{"a": [1, {"b": "c"}]}', True, "</end>")


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a"', '{"a": ', '{"a": 1', '"a', "[1 2]", "{1: 2}", "01", "1.", "-", "+1", "NaN", "True",
     "tru", "[,]", '{"a": 1, "b"}', '"\\x"', '"\\u12"', "[}", "1 2", "nan", "'a'", "[" * 300 + "]" * 300,
     "9" * 5000],
)  # fmt: skip
def test_anything_else_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        tolerant(text)


def test_pythons_words_are_read_where_they_are_written() -> None:
    assert tolerant('{"a": True, "b": None}', is_python=True) == ReadValue('{"a": true, "b": null}')


def test_strict_takes_json_alone() -> None:
    assert strict('{"a": 9007199254740993}') == {"a": 9007199254740993}
    for text in ("NaN", "[Infinity]", "{", "[" * 100_000):
        with pytest.raises(ValueError):
            strict(text)
