"""Sampling parameters: how one request's tokens are drawn."""

from __future__ import annotations

import dataclasses

SEED_RANGE = 1 << 64
"""Seeds are from 0 to below this."""

DEFAULT_XTC_THRESHOLD = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, in mlx-lm's order: bias, penalties, bans; then at temperature 1 the
    filters top_p, min_p, XTC, top_k; then the draw at `temperature`."""

    temperature: float = 0.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """(0, 1]; 1 switches the filter off."""
    top_k: int = 0
    """>= 0; 0 switches the filter off."""
    min_p: float = 0.0
    """[0, 1); 0 switches the filter off."""
    xtc_probability: float = 0.0
    """[0, 1]; how often the filter removes the likeliest tokens; 0 switches it off."""
    xtc_threshold: float = DEFAULT_XTC_THRESHOLD
    """[0, 0.5]; the filter removes tokens likelier than this, all but the least likely of them."""
    repetition_penalty: float = 1.0
    """> 0; divides logits of tokens seen in prompt and output, and multiplies negative ones."""
    repetition_window: int = 0
    """How many of the last tokens of prompt and output count as seen; 0 for all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens seen in the output."""
    presence_window: int = 0
    """Last output tokens that count; 0 is all of them."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was seen in the output."""
    frequency_window: int = 0
    """Last output tokens that count; 0 is all of them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id, each only once, and what is added to its logit."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never appear in the output, even if they begin in the prompt."""
    min_output_token_count: int = 0
    """Output tokens before an end token may be drawn or a stop string has an effect."""
    ignores_end_tokens: bool = False
    """Whether end tokens are treated like any other token."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the output, even with `ignores_end_tokens`. All are in the vocabulary."""
    seed: int = 0
    """Any 64-bit value; the same seed gives the same text in any batch position."""
