"""Open-loop arrivals: which requests arrive when, decided in advance and the same for every server."""

from __future__ import annotations

import dataclasses
import enum
import random

from bench.prompts import short_prompts


class Kind(enum.Enum):
    """The kind of a request's prompt."""

    SHORT = "short"
    """A few unique sentences."""
    LONG = "long"
    """A unique page."""
    SHARED = "shared"
    """One of a few shared pages, and a unique question."""


_SHARES = {Kind.SHORT: 0.6, Kind.LONG: 0.15, Kind.SHARED: 0.25}
_PAGE_SENTENCES = 5
_PAGE_COUNT = 4
_OUTPUT_TOKENS = (8, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the plan. `at_s` counts from the plan's start."""

    at_s: float
    kind: Kind
    text: str
    max_output_tokens: int


def poisson_arrivals(*, rate_per_s: float, duration_s: float, seed: int) -> list[Arrival]:
    """Return arrivals with exponential gaps over the duration; other seeds share no text, pages included.

    Times and kinds are the same for every seed, only faster with a higher rate, so that two loads differ by
    their rates and not by luck.
    """
    plan, words = random.Random(0), random.Random(seed)
    pages = [page(_PAGE_SENTENCES, seed=100_000 * (seed + 1) + i) for i in range(_PAGE_COUNT)]
    found: list[Arrival] = []
    at_s = plan.expovariate(1.0) / rate_per_s
    while at_s < duration_s:
        kind = plan.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
        shared_page = pages[plan.randrange(_PAGE_COUNT)]
        text = _text(kind, shared_page, words)
        found.append(Arrival(at_s, kind, text, plan.randint(*_OUTPUT_TOKENS)))
        at_s += plan.expovariate(1.0) / rate_per_s
    return found


def page(sentence_count: int, *, seed: int) -> str:
    """Return that many pairs of sentences; another seed shares no beginning."""
    return f"{seed:09d} " + " ".join(short_prompts(sentence_count, seed=seed))


def _text(kind: Kind, shared_page: str, words: random.Random) -> str:
    own = page(1, seed=words.randrange(10**9))
    if kind is Kind.SHORT:
        return own
    if kind is Kind.LONG:
        return page(_PAGE_SENTENCES, seed=words.randrange(10**9))
    return f"{shared_page} {own}"
