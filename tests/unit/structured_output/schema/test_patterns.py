"""Patterns without look-around match what the patterns with it do."""

from __future__ import annotations

import itertools
import re

import pytest
from icehouse_server.structured_output.schema.patterns import without_look_around

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
HOSTNAME = r"^(?=.{1,6}\.?$)[a-z0-9](?:[a-z0-9-]{0,3}[a-z0-9])?(?:\.[a-z0-9](?:[-0-9a-z]{0,3}[0-9a-z])?)*\.?$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
PASSWORD = r"^(?=.*[A-Z])(?=.*\d)(?=[^)]*\))[A-Za-z\d()]{3,}$"
# Pattern, and of what the texts are made that it is tried with.
EXACT = [
    (EMAIL, "a-.@'"),
    (DURATION, "P1WDTMS."),
    (HOSTNAME, "a-."),
    (rf"{DECIMAL}\d*\.?\d*$", "+-.0a"),
    (rf"{DECIMAL}\d*\.?\d{{0,2}}0*$", "+.012"),
    (PASSWORD, "aA1()"),
]
NO_LOOKING = [r"^[(?=]a$", r"\(?=", r"^a(?:b|c)(?P<n>d)$", r"[?=(?!]", "("]
NOT_EXPRESSED = [
    r"a(?=b)",
    r"^a(?=b)c",
    r"^(?!a)b",
    r"(?<=a)b",
    r"(?<!a)b",
    r"^(?=a)b|c",
    r"^(?=a(?!b))c",
    "^(?=a",
]


@pytest.mark.parametrize(("pattern", "letters"), EXACT)
def test_a_known_pattern_matches_the_same_texts(pattern: str, letters: str) -> None:
    parts = without_look_around(pattern)
    assert parts is not None and not any("(?=" in part or "(?!" in part for part in parts)
    texts = ["".join(each) for length in range(7) for each in itertools.product(letters, repeat=length)]
    if pattern == EMAIL:
        texts = [*texts, *(f"{text}@a.bc" for text in texts), *(f"a@{text}.bc" for text in texts)]
    expected = {text for text in texts if re.search(pattern, text)}
    found = {text for text in texts if all(re.search(part, text) for part in parts)}
    assert found == expected and expected


@pytest.mark.parametrize(
    "digits", [r"\d{0,2}|(?=[\d.]{1,4}0*$)\d{0,2}\.\d{0,1}0*$", r"\d{0,2}|(?=[\d.]{1,3}0*$)\d*\.\d*0*$"]
)
def test_a_decimal_of_so_many_digits_matches_no_more(digits: str) -> None:
    """pydantic's own pattern ends nowhere in its first alternative; ours does."""
    pattern = rf"{DECIMAL}(?:{digits})"
    parts = without_look_around(pattern)
    assert parts is not None
    whole = pattern.replace("}|", "}$|", 1)
    for text in map("".join, itertools.chain(*(itertools.product("+.012", repeat=n) for n in range(7)))):
        assert bool(re.search(whole, text)) == all(re.search(part, text) for part in parts), text


@pytest.mark.parametrize("pattern", NO_LOOKING)
def test_a_pattern_that_looks_nowhere_is_left_alone(pattern: str) -> None:
    assert without_look_around(pattern) == (pattern,)


@pytest.mark.parametrize("pattern", NOT_EXPRESSED)
def test_a_pattern_that_looks_elsewhere_cannot_be_kept_to(pattern: str) -> None:
    assert without_look_around(pattern) is None
