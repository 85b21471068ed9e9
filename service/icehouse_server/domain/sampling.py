"""Sampling parameters: how one request's tokens are drawn."""

from __future__ import annotations

import dataclasses

SEED_RANGE = 1 << 64
"""Seeds are 0 to this, exclusively."""

DEFAULT_XTC_THRESHOLD = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, in this order, which is mlx-lm's: bias, penalties, bans; then at
    temperature 1 the filters top_p, min_p, XTC, top_k; then the draw at the temperature."""

    temperature: float = 0.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """(0, 1]; 1 switches the filter off."""
    top_k: int = 0
    """>= 0; 0 switches the filter off."""
    min_p: float = 0.0
    """[0, 1); 0 switches the filter off."""
    xtc_probability: float = 0.0
    """[0, 1]; how often the likeliest tokens are left out; 0 switches the filter off."""
    xtc_threshold: float = DEFAULT_XTC_THRESHOLD
    """[0, 0.5]; tokens likelier than this are left out, all but the least likely of them."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens seen in prompt and output are divided by it, negative ones multiplied."""
    repetition_window: int = 0
    """How many of the last tokens of prompt and output count as seen; 0 is all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens seen in the output."""
    presence_window: int = 0
    """Last output tokens that count; 0 is all of them."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was seen in the output."""
    frequency_window: int = 0
    """Last output tokens that count; 0 is all of them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never appear in the output, even if they begin in the prompt."""
    min_output_token_count: int = 0
    """Output tokens before an end token may be drawn or a stop string counts."""
    ignores_end_tokens: bool = False
    """An end token is a token like any other."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the output, even with `ignores_end_tokens`. Inside the vocabulary."""
    seed: int = 0
    """Any 64-bit value; the same seed gives the same text in any batch position."""
