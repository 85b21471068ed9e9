"""Decode row: what a sequence brings along when it begins to decode."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.ids import NO_ADAPTER, AdapterName
from icehouse_server.domain.request import LogprobsWanted, Speculation
from icehouse_server.domain.response_format import Constraint
from icehouse_server.domain.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRow:
    """Everything the next token depends on but the KV; handed over with the last input tokens."""

    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    """Drawn before the sequence was parked: the draws, the penalties and the constraint go on from there."""
    adapter: AdapterName = NO_ADAPTER
    """Rows decode in one forward pass with rows of the same adapter only."""
    constraint: Constraint | None = None
    """A fresh one; it is told `output_token_ids` when the row joins."""
    logprobs: LogprobsWanted | None = None
    """What to tell of each drawn token; None tells no log probabilities."""
    speculation: Speculation | None = None
    """Asked for; the runner tells with the first token whether it can."""
