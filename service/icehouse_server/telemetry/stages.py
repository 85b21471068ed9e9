"""Stages of a call: where its time went, from what its end said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from icehouse_server.domain.call import CallRecord

Attribute = str | int | float


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of a call, in seconds since it reached the edge."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = dataclasses.field(default_factory=dict)


def stages_of(record: CallRecord) -> Iterator[Stage]:
    """Yield the stages that the call came to, in their order.

    Only what was told: a request that was cancelled in prefill has no prefill stage, since its length
    is known of requests that ran to their end alone.
    """
    if record.tokenize_s > 0:
        yield Stage("tokenize", 0.0, record.tokenize_s, {"icehouse.prompt.tokens": record.prompt_token_count})
    started = record.started
    if started is None:
        return
    yield Stage("queue", min(record.tokenize_s, started.queue_s), started.queue_s)
    # What a restore became is known for certain only at the end.
    cache = record.usage.cache if record.usage is not None else started.cache
    restored_s = started.queue_s + cache.restore_s
    if cache.restore_s > 0:
        yield Stage(
            "restore",
            started.queue_s,
            restored_s,
            {
                "icehouse.ram.tokens": cache.ram_token_count,
                "icehouse.ssd.tokens": cache.ssd_token_count,
                "icehouse.reuse.limit": cache.limit.name.lower(),
            },
        )
    usage = record.usage
    if usage is None:
        return
    computed_count = usage.prompt_token_count - usage.cache.cached_token_count
    yield Stage("prefill", restored_s, restored_s + usage.prefill_s, {"icehouse.tokens": computed_count})
    if usage.output_token_count:
        yield Stage(
            "decode",
            usage.ttft_s,
            usage.ttft_s + usage.decode_s,
            {"icehouse.tokens": usage.output_token_count},
        )
