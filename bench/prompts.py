"""Prompts for the benches: plain English of a wanted length, all different from the first words on."""

from __future__ import annotations

import random

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
    """Return `count` openings of at least 20 tokens; they differ from their first characters on."""
    source = random.Random(seed)
    return [f"{number:04d} {_sentence(source)} {_sentence(source)} After that," for number in range(count)]


def long_text(sentence_count: int, *, seed: int) -> str:
    """Return that many sentences, about 12 tokens each; another seed shares no beginning with it."""
    source = random.Random(seed)
    return " ".join([f"Story number {seed}.", *(_sentence(source) for _ in range(sentence_count))])


def _sentence(source: random.Random) -> str:
    pick = source.choice
    return (
        f"The {pick(_QUALITIES)} {pick(_SUBJECTS)} of the {pick(_PLACES)} {pick(_VERBS)} "
        f"a {pick(_QUALITIES)} {pick(_THINGS)}."
    )
