"""What one caller asks of the engine, after validation and tokenization."""

from __future__ import annotations

import dataclasses
import enum

from service.domain.cache_scope import CacheScope
from service.domain.constraint import Grammar
from service.domain.embedding import Pooling
from service.domain.ids import DEFAULT_TENANT, NO_ADAPTER, AdapterName, RequestId, Tenant
from service.domain.logprobs import LogprobsWanted
from service.domain.sampling import SEED_RANGE, SamplingParams
from service.domain.speculation import Speculation

_PART_MARK = "#"
"""Between a call's name and the number of one of its requests. No caller's name has it."""


class CacheUse(enum.Enum):
    """What a request may do with the prefix cache."""

    READ_WRITE = enum.auto()
    READ_ONLY = enum.auto()
    WRITE_ONLY = enum.auto()
    OFF = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Token ids are inside the vocabulary, limits already checked."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int
    """>= 1, or 0 for a warm-up that computes and keeps the prompt only."""
    sampling: SamplingParams
    stop: tuple[str, ...]
    arrival_time: float
    """`Clock.monotonic` when the call reached the edge; TTFT counts from here."""
    deadline_time: float | None = None
    """`Clock.monotonic` after which nobody waits for the answer."""
    cache_use: CacheUse = CacheUse.READ_WRITE
    tenant: Tenant = DEFAULT_TENANT
    adapter: AdapterName = NO_ADAPTER
    """One of those served, already checked."""
    shared_tenant: Tenant | None = None
    """Another tenant whose blocks it may start from. It writes none of them."""
    priority: int = 0
    """Higher runs first."""
    shows_markers: bool = False
    """Whether special tokens are a part of the text, but for those that begin, end or pad it."""
    grammar: Grammar | None = None
    """What the output must be, if anything."""
    logprobs: LogprobsWanted | None = None
    """None tells no log probabilities."""
    speculation: Speculation | None = None
    pooling: Pooling | None = None
    """Asks for the prompt's pooled hidden states; every token of it then runs, and nothing is generated."""

    @property
    def scope(self) -> CacheScope:
        """With whom its KV is shared."""
        return CacheScope(self.tenant, self.adapter)

    @property
    def shared_scope(self) -> CacheScope | None:
        """Whose KV it may start from too, if anybody's."""
        return None if self.shared_tenant is None else CacheScope(self.shared_tenant, self.adapter)

    def completion(self, index: int) -> GenerationRequest:
        """Return the request for another output of the same prompt; 0 is this one.

        It draws from a seed higher by `index` and leaves the prompt's log probabilities to the first.
        """
        if index == 0:
            return self
        seed = (self.sampling.seed + index) % SEED_RANGE
        logprobs = self.logprobs
        return dataclasses.replace(
            self,
            request_id=part_of(self.request_id, index),
            sampling=dataclasses.replace(self.sampling, seed=seed),
            logprobs=None if logprobs is None else dataclasses.replace(logprobs, of_prompt=False),
        )


def call_of(request_id: RequestId) -> RequestId:
    """Return the name of the call that a request belongs to: itself, unless it is a further one of a call."""
    return RequestId(request_id.partition(_PART_MARK)[0])


def part_of(call: RequestId, index: int) -> RequestId:
    """Return the name of a call's request; the first has the call's own."""
    return RequestId(f"{call}{_PART_MARK}{index}") if index else call
