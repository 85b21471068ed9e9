"""Console: a model's text on a terminal."""

from __future__ import annotations

import pytest
from icehouse_client.cli.console import harmless

REPLACED = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "text",
    [
        "a\tb\nc",
        "日本\u3000語",
        "«\u00a0oui\u202f!\u00a0»",
        "👨\u200d👩\u200d👧",
        "می\u200cشود",
        "\U0001fae8",
    ],
)
def test_text_of_any_language_stays_as_it_is(text: str) -> None:
    assert harmless(text) == text


@pytest.mark.parametrize("char", ["\x1b", "\r", "\x07", "\x9b", "\u202e", "\u2066", "\ud800"])
def test_nothing_is_left_that_a_terminal_obeys(char: str) -> None:
    assert harmless(f"a{char}b") == f"a{REPLACED}b"
