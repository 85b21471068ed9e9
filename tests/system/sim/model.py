"""A language model of arithmetic: the tokens that it draws depend on every bit in its caches.

Each token adds a row that is a hash of the caches before it and of the token. A row that is
missing, stale, shifted or of another sequence changes every later row and every token drawn
after it, so a wrong restore cannot hide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.domain.events import FinishReason
from icehouse_server.domain.ids import AdapterName
from icehouse_server.domain.request import GenerationRequest

EOS = 0
CONTEXT_TOKEN_LIMIT = 96
ALPHABET = b"abcd"
_MASK = (1 << 64) - 1
_EOS_ODDS = 24
"""One draw in this many ends the sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """The kinds of cache that the model's layers have; `weights` tells two models apart."""

    weights: int
    has_kv: bool
    window_token_count: int
    has_state: bool

    def with_adapter(self, adapter: AdapterName) -> ModelSpec:
        """Return the model with an adapter: other weights, the same caches."""
        return dataclasses.replace(self, weights=mix(self.weights, *adapter.encode())) if adapter else self


def mix(*values: int) -> int:
    """Return a 64-bit hash of 64-bit values."""
    result = 0x9E3779B97F4A7C15
    for value in values:
        result = ((result ^ value) * 0xBF58476D1CE4E5B9) & _MASK
        result ^= result >> 29
    return result


def visible(key: int) -> int:
    """Return the model's input for a token: its id, or for an image's token a hash of its vector."""
    return mix(*(key >> shift & _MASK for shift in range(0, key.bit_length(), 64))) if key > _MASK else key


class Caches:
    """The caches of one sequence: kv rows, the last window rows, one state."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.position = 0
        self.kv: list[int] = []
        self.window: list[int] = []
        self.state = 0
        self._kv_fold = 0

    @classmethod
    def of(
        cls, spec: ModelSpec, *, position: int, kv: Sequence[int], window: Sequence[int], state: int
    ) -> Caches:
        """Return caches with restored content."""
        caches = cls(spec)
        caches.position, caches.kv, caches.window, caches.state = position, list(kv), list(window), state
        for row in kv:
            caches._kv_fold = mix(caches._kv_fold, row)
        return caches

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Run tokens in one pass; a window then holds all of that pass's tokens, as mlx-lm's does."""
        if self.spec.window_token_count and len(token_ids) > 1:
            del self.window[: -(self.spec.window_token_count - 1)]
        for token_id in token_ids:
            self._advance(token_id)

    def run(self, token_id: int) -> None:
        """Run one token in place."""
        self._advance(token_id)
        if self.spec.window_token_count:
            del self.window[: -self.spec.window_token_count]

    def draw(self, seed: int) -> int:
        """Return the next token: a function of all content of the caches."""
        drawn = mix(self._digest(), seed)
        if drawn % _EOS_ODDS == 0:
            return EOS
        return ALPHABET[(drawn >> 8) % len(ALPHABET)]

    def _digest(self) -> int:
        window = self.window[1 - self.spec.window_token_count :] if self.spec.window_token_count else ()
        return mix(self.spec.weights, self._kv_fold, mix(*window), self.state, self.position)

    def _advance(self, token_id: int) -> None:
        seen = mix(self._digest(), token_id)
        if self.spec.has_kv:
            self.kv.append(mix(seen, 1))
            self._kv_fold = mix(self._kv_fold, self.kv[-1])
        if self.spec.window_token_count:
            self.window.append(mix(seen, 2))
        if self.spec.has_state:
            self.state = mix(seen, 3)
        self.position += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request that nothing disturbs."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason


def reference_reply(spec: ModelSpec, request: GenerationRequest) -> Reply:
    """Compute the reply from scratch, without blocks, batches or chunks."""
    caches = Caches(spec.with_adapter(request.adapter))
    for key in request.keys(request.prompt_token_ids):
        caches.run(visible(key))
    room = CONTEXT_TOKEN_LIMIT - len(request.prompt_token_ids)
    reason = FinishReason.LENGTH if request.max_output_tokens <= room else FinishReason.CONTEXT_LENGTH
    tokens: list[int] = []
    text = ""
    while len(tokens) < min(request.max_output_tokens, room):
        tokens.append(caches.draw(request.sampling.seed))
        if tokens[-1] == EOS:
            return Reply(tuple(tokens), text, FinishReason.STOP_TOKEN)
        text += chr(tokens[-1])
        found = [text.index(stop) for stop in request.stop if stop in text]
        if found:
            return Reply(tuple(tokens), text[: min(found)], FinishReason.STOP_STRING)
        caches.run(tokens[-1])
    return Reply(tuple(tokens), text, reason)
