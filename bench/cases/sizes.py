"""Sizes of the cases, in tokens and callers: those of the table of targets, and small ones for a look."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How long prompts and replies are, and how many callers come."""

    client_counts: tuple[int, ...] = (1, 4, 16, 64)
    lone_repeat_count: int = 3
    """How often a round repeats the case of one client, which is short and therefore noisy."""
    short_prompt_token_count: int = 40
    short_output_token_count: int = 48
    long_prompt_token_count: int = 2000
    middle_prompt_token_count: int = 500
    mix_output_token_count: int = 32
    beside_prompt_token_count: int = 1000
    row_output_token_limit: int = 1024
    """Of rows that decode until they are cancelled: more than they come to."""
    alone_step_count: int = 32
    """Steps that such rows have taken together before anything else happens."""
    system_prompt_token_count: int = 1500
    own_prompt_token_count: int = 30
    restart_prompt_token_count: int = 800
    loop_request_count: int = 160


FULL = Sizes()
QUICK = Sizes(
    client_counts=(1, 4, 16),
    lone_repeat_count=1,
    short_prompt_token_count=20,
    short_output_token_count=16,
    long_prompt_token_count=300,
    middle_prompt_token_count=100,
    mix_output_token_count=8,
    beside_prompt_token_count=300,
    alone_step_count=16,
    system_prompt_token_count=300,
    own_prompt_token_count=30,
    restart_prompt_token_count=200,
    loop_request_count=48,
)
