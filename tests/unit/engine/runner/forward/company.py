"""Rows in company: a small scheduler that draws greedily, with chunks, joins and guesses at random, chunks
on their way through the layers among them.

`alone` gives what each row's tokens and logits are through the model's own call; `Company` runs the same
rows in forward passes, whatever company they have.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import LayeredChunk, Row, Share
from icehouse_server.engine.runner.forward.splits import PassFacts
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import build
from tests.fixtures.models.at_once import examine
from tests.fixtures.models.vocabulary import SPECIAL_TOKENS

MakeCaches = Callable[[], list[Any]]
_FED_AGAIN_LIMIT = 6
DRAW_COUNT = 12
"""Tokens that guests want."""


def prompt_of(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(len(SPECIAL_TOKENS), 200) for _ in range(count)]


def alone(
    model: Any, prompt: Sequence[int], count: int, make: MakeCaches | None = None
) -> tuple[list[int], list[mx.array]]:
    """Return the tokens of a row by itself, and the logits that each was drawn from."""
    caches = make() if make else make_prompt_cache(model)
    logits = model(mx.array(list(prompt))[None], cache=caches)[0, -1]
    tokens, seen = [], []
    for _ in range(count):
        tokens.append(int(mx.argmax(logits).item()))
        seen.append(logits)
        logits = model(mx.array([[tokens[-1]]]), cache=caches)[0, -1]
    return tokens, seen


@functools.cache
def examined(architecture: str) -> tuple[Any, PassFacts]:
    """Return a model and how its passes are run; made once for all tests, which leave both as they are."""
    model = build(architecture)
    return model, examine(model)


@functools.cache
def _alone_once(architecture: str, prompt: tuple[int, ...]) -> tuple[list[int], list[mx.array]]:
    return alone(examined(architecture)[0], prompt, DRAW_COUNT)


def guests_of(architecture: str, lengths: Sequence[int], make_caches: MakeCaches) -> list[Guest]:
    """Return rows of the model of `examined`, with prompts of these lengths."""
    guests = []
    for seed, length in enumerate(lengths):
        prompt = prompt_of(length, seed)
        tokens, logits = _alone_once(architecture, tuple(prompt))
        guests.append(Guest(prompt, tokens, logits, Row(make_caches()), list(prompt)))
    return guests


@dataclasses.dataclass
class Guest:
    """One row, what is still to be fed, and what was drawn."""

    prompt: list[int]
    want: list[int]
    """What it draws alone, from which right guesses are made."""
    want_logits: list[mx.array]
    row: Row
    todo: list[int]
    drawn: list[int] = dataclasses.field(default_factory=list)
    farthest: float = 0.0
    """The largest difference of logits seen."""
    park_count: int = 0
    is_cancelled: bool = False
    layered: LayeredChunk | None = None
    """Tokens of its prompt on their way through the layers."""

    @property
    def is_done(self) -> bool:
        return len(self.drawn) >= len(self.want)

    @property
    def has_prompt_left(self) -> bool:
        # What is fed again behind a wrong guess is less than this, what a parked one comes back with is more.
        return len(self.todo) > (_FED_AGAIN_LIMIT if self.drawn else 1)

    def leave(self) -> None:
        """Stop here: what it drew is what it would have drawn."""
        self.is_cancelled = True
        self.want = self.want[: len(self.drawn)]

    def come_back(self, row: Row) -> None:
        """Begin anew, as one that was parked does: with its output as input."""
        self.park_count += 1
        self.layered = None
        self.row, self.todo = row, [*self.prompt, *self.drawn]


class Company:
    """All rows of a test, in passes until all have what they want."""

    def __init__(
        self, forward: ForwardPass, *, seed: int, guesses: bool, make_caches: MakeCaches | None = None
    ) -> None:
        """With `make_caches`, for rows that come back, some are parked and some leave before their end."""
        self._forward = forward
        self._make_caches = make_caches
        self._random = random.Random(seed)
        self._guesses = guesses and forward.facts.can_take_back
        self.pass_count = 0
        self.widest = 0
        self.layered_count = self.dropped_count = 0
        """Chunks that went through the layers a few in each pass, and those given up on their way."""

    def run(self, guests: Sequence[Guest]) -> None:
        waiting = list(guests)
        here: list[Guest] = []
        while waiting or here:
            while waiting and (not here or self._random.random() < 0.4):
                here.append(waiting.pop(0))
            self.step([guest for guest in here if self._random.random() < 0.9] or here)
            if self._make_caches is not None:
                self._disturb(self._random.choice(here), self._make_caches)
            for guest in [guest for guest in here if guest.is_done]:
                guest.row.leave_group()
                here.remove(guest)

    def _disturb(self, guest: Guest, make_caches: MakeCaches) -> None:
        """Park one of those that are here, or cancel it, in whatever phase it is."""
        chance = self._random.random()
        if guest.is_done:
            return
        if chance < 0.2:
            guest.row.leave_group()
            guest.come_back(Row(make_caches()))
        elif chance < 0.24:
            guest.leave()

    def step(self, guests: Sequence[Guest]) -> None:
        """Run one pass in which each of these brings something."""
        layered = [guest for guest in guests if self._goes_layered(guest)]
        for guest in layered:
            self._go_on(guest)
        bringing = [self._bring(guest) for guest in guests if guest not in layered]
        if not bringing:
            return
        ids = [token for _, fed, _ in bringing for token in fed]
        shares = [
            Share(
                guest.row,
                len(fed),
                logit_count=0 if len(fed) < len(guest.todo) else guess_count + 1,
                may_be_taken_back=guess_count > 0,
            )
            for guest, fed, guess_count in bringing
        ]
        output = self._forward.run(mx.array(ids), shares)
        mx.eval(output.arrays)
        self.pass_count += 1
        self.widest = max(self.widest, len(shares))
        for (guest, fed, guess_count), (first, last) in zip(bringing, output.logit_spans, strict=True):
            if last == first:
                guest.todo = guest.todo[len(fed) :]
            else:
                assert output.logits is not None
                self._take(guest, fed, guess_count, output.logits[first:last])

    def _goes_layered(self, guest: Guest) -> bool:
        """Whether a guest brings a chunk on its way through the layers; it may begin or be given up now."""
        if guest.layered is not None and self._random.random() < 0.25:
            guest.layered = None
            self.dropped_count += 1
        elif guest.layered is None and guest.has_prompt_left and self._forward.facts.layer_count:
            if len(guest.todo) <= 3 or self._random.random() < 0.5:
                return False
            count = self._random.randint(2, len(guest.todo) - 1)
            guest.layered = self._forward.begin_layers(guest.row, guest.todo[:count])
        return guest.layered is not None

    def _go_on(self, guest: Guest) -> None:
        """Take a guest's chunk through some more layers."""
        assert guest.layered is not None
        last = self._random.randint(guest.layered.layer + 1, self._forward.facts.layer_count)
        mx.eval(self._forward.run_layers(guest.layered, last))
        if last == self._forward.facts.layer_count:
            guest.todo = guest.todo[len(guest.layered.token_ids) :]
            guest.layered = None
            self.layered_count += 1

    def _bring(self, guest: Guest) -> tuple[Guest, list[int], int]:
        """Return the tokens of a guest's share, and how many of them are guesses."""
        if guest.has_prompt_left:
            return guest, guest.todo[: self._random.choice([1, 3, 7, 20, 80])], 0
        room = len(guest.want) - len(guest.drawn) - 1
        count = (
            min(room, self._random.choice([0, 0, 1, 4]))
            if self._guesses and guest.drawn and guest.row.token_count
            else 0
        )
        begin = len(guest.drawn)
        guesses = guest.want[begin : begin + count]
        if count and self._random.random() < 0.6:
            wrong = self._random.randrange(count)
            guesses[wrong] = (guesses[wrong] + 1) % 200
        return guest, guest.todo + guesses, count

    def _take(self, guest: Guest, fed: list[int], guess_count: int, logits: mx.array) -> None:
        """Take the drawn tokens as far as the guesses were right, and the rest back."""
        drawn: Any = mx.argmax(logits, axis=-1).tolist()
        guesses = fed[len(fed) - guess_count :]
        right = next((i for i, guess in enumerate(guesses) if drawn[i] != guess), guess_count)
        kept = drawn[: right + 1]
        for offset, place in enumerate(range(len(guest.drawn), len(guest.drawn) + len(kept))):
            moved = mx.abs(logits[offset] - guest.want_logits[place]).max()
            guest.farthest = max(guest.farthest, float(moved.item()))
        guest.drawn += kept
        again = guest.row.take_back(guess_count - right) if guess_count else 0
        stays = fed[: len(fed) - (guess_count - right)]
        guest.todo = [*(stays[len(stays) - again :] if again else []), kept[-1]]
