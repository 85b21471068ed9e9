"""Prompts for the benches: plain English of a given length, all different from the first words on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

SHORT_PROMPT_TOKEN_COUNT = 24
"""Length to which decode benches cut `short_prompts`."""

_SUBJECTS = (
    "captain",
    "gardener",
    "teacher",
    "baker",
    "doctor",
    "painter",
    "sailor",
    "farmer",
    "pilot",
    "clerk",
    "miner",
    "singer",
)
_PLACES = (
    "harbour",
    "village",
    "mountain",
    "library",
    "market",
    "island",
    "forest",
    "castle",
    "station",
    "museum",
    "desert",
    "valley",
)
_THINGS = (
    "letter",
    "clock",
    "lantern",
    "map",
    "bridge",
    "garden",
    "violin",
    "ship",
    "mirror",
    "kettle",
    "engine",
    "window",
)
_VERBS = ("found", "repaired", "carried", "described", "painted", "measured", "forgot", "borrowed")
_QUALITIES = ("old", "heavy", "quiet", "broken", "golden", "strange", "narrow", "famous", "wooden", "distant")


def short_prompts(count: int, *, seed: int) -> list[str]:
    """Return `count` openings of at least 20 tokens, which differ from their first characters on."""
    source = random.Random(seed)
    return [f"{number:04d} {_sentence(source)} {_sentence(source)} After that," for number in range(count)]


class FreshPrompts:
    """New prompts of given lengths: tokens drawn with a seed from those of plain text.

    Two of them share no beginning that a cache would keep.
    """

    def __init__(self, token_ids: Sequence[int], *, seed: int) -> None:
        self._token_ids = sorted(set(token_ids))
        self._source = random.Random(seed)
        assert len(self._token_ids) > 1, "one token makes one prompt of each length only"

    def take(self, token_count: int) -> list[int]:
        """Return the next prompt."""
        return self._source.choices(self._token_ids, k=token_count)

    def take_each(self, token_counts: Iterable[int]) -> list[list[int]]:
        """Return the next prompts, one of each length, in order."""
        return [self.take(token_count) for token_count in token_counts]


class Tokenizing(Protocol):
    """Anything that can tokenize a text."""

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        ...


async def text_of_tokens(tokenizer: Tokenizing, token_count: int, *, seed: int) -> str:
    """Return English text of about `token_count` tokens; another seed shares no beginning with it."""
    source = random.Random(seed)
    text = f"{seed:04d}"
    while len(await tokenizer.tokenize(text)) < token_count:
        text = f"{text} {_sentence(source)}"
    words = text.split(" ")
    while len(await tokenizer.tokenize(" ".join(words))) > token_count:
        words.pop()
    return " ".join(words)


def _sentence(source: random.Random) -> str:
    pick = source.choice
    return (
        f"The {pick(_QUALITIES)} {pick(_SUBJECTS)} of the {pick(_PLACES)} {pick(_VERBS)} "
        f"a {pick(_QUALITIES)} {pick(_THINGS)}."
    )
