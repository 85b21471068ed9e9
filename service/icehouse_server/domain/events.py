"""Events of one request: `Started` once, then progress and deltas, then one end event.

The end is `Finished` or `Failed`. A request that is refused before it started gets only `Failed`.
"""

from __future__ import annotations

import dataclasses
import enum

from icehouse_server.domain.request import NO_DRAFTS, DraftCounts, TokenLogprobs, Vector
from icehouse_server.errors import IcehouseError


class FinishReason(enum.Enum):
    """Why generation ended."""

    STOP_TOKEN = enum.auto()
    STOP_STRING = enum.auto()
    LENGTH = enum.auto()
    CONTEXT_LENGTH = enum.auto()
    TOOL_CALLS = enum.auto()
    """The model ended its turn after a tool call. Only the reply's parser can tell this from STOP_TOKEN."""


class ReuseLimit(enum.Enum):
    """Why the cached prefix was not longer."""

    NONE = enum.auto()
    """Everything that can be reused was reused."""
    NO_MATCH = enum.auto()
    """No block with this beginning is known."""
    DIVERGED = enum.auto()
    """After the matched tokens the prompt differs from every known one."""
    NO_CHECKPOINT = enum.auto()
    """Blocks match further, but this model can resume only at a checkpoint."""
    RECOMPUTE_FASTER = enum.auto()
    """Loading was predicted to take longer than prefilling."""
    LOAD_FAILED = enum.auto()
    """A block on SSD was missing, damaged or another prompt's, and was dropped; or the disk was hanging."""
    SWITCHED_OFF = enum.auto()
    """The request or the server does not use the cache."""
    UNSUPPORTED = enum.auto()
    """This model's cache classes cannot be cut into blocks."""
    PROMPT_LOGPROBS = enum.auto()
    """The prompt's log probabilities were asked for, so all its tokens were computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptDivergence:
    """Where a prompt first differs from a cached one of the same tenant that shares more than half of it."""

    token_index: int
    """Position in the prompt of the first token that differs."""
    prompt_token_id: int
    cached_token_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheReport:
    """How much of the prompt was reused, from where, and why not more, in tokens."""

    ram_token_count: int = 0
    ssd_token_count: int = 0
    restore_s: float = 0.0
    limit: ReuseLimit = ReuseLimit.SWITCHED_OFF
    divergence: PromptDivergence | None = None

    @property
    def cached_token_count(self) -> int:
        return self.ram_token_count + self.ssd_token_count


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost. Durations in seconds; `ttft_s` from arrival to the first token."""

    prompt_token_count: int
    output_token_count: int
    cache: CacheReport
    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    drafts: DraftCounts = NO_DRAFTS
    """Draft tokens of speculation."""
    image_token_count: int = 0
    """Prompt tokens in the spans of images."""
    reasoning_token_count: int = 0
    """Output tokens of the model's reasoning."""
    promoted_token_count: int = 0
    """For a warm-up: prompt tokens from SSD whose blocks are in RAM now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue and its prefix was looked up."""

    prompt_token_count: int
    cache: CacheReport
    queue_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`processed_token_count` of the prompt's tokens are in KV now, including reused ones."""

    processed_token_count: int
    prompt_token_count: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens since the last progress, if asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """New text, whole characters only, and the tokens sampled since the last delta.

    A token's text may come with a later delta, or never if a stop string removed it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, if asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ran to its end."""

    reason: FinishReason
    stop_string: str | None
    usage: Usage
    embedding: Vector | None = None
    """The pooled hidden states of the prompt, if the request asked for them."""
    stop_token_id: int | None = None
    """The last token, if it is one that ended the output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that was refused or cancelled, or that failed."""

    error: IcehouseError


Event = Started | PrefillProgress | Delta | Finished | Failed
