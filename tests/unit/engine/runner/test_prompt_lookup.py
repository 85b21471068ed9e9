"""Guesses from the tokens so far, against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.engine.runner.speculation import PromptLookup


def plain_search(tokens: list[int], *, ngram: int, count: int) -> list[int]:
    """The longest end that stood earlier; of equals the latest with enough behind."""
    for length in range(min(ngram, len(tokens) - 1), 0, -1):
        places = [at for at in range(len(tokens) - length) if tokens[at : at + length] == tokens[-length:]]
        behind = [tokens[place + length : place + length + count] for place in places]
        if behind:
            return next((found for found in reversed(behind) if len(found) == count), behind[0])
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    more=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=4),
    ngram=st.integers(1, 8),
    count=st.integers(0, 16),
)
def test_proposes_what_a_plain_search_finds(
    tokens: list[int], more: list[list[int]], ngram: int, count: int
) -> None:
    lookup = PromptLookup(tokens, ngram_token_limit=ngram)
    for added in [[], *more]:
        tokens = tokens + added
        lookup.extend(added)
        assert lookup.propose(count) == plain_search(tokens, ngram=ngram, count=count)


def test_grows_past_its_first_room() -> None:
    lookup = PromptLookup([1, 2, 3], ngram_token_limit=2)
    for _ in range(200):
        lookup.extend([7, 8, 9])
    lookup.extend([1, 2])
    assert lookup.propose(4) == [3, 7, 8, 9]
