"""A house's snapshot with every number different, and ended calls."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    DiskStats,
    IntegrityStats,
    LookupStats,
    MissTokens,
    PromoteStats,
    SpillDropCause,
    SpillDrops,
    SpillStats,
    TenantShare,
    TierStats,
)
from icehouse_server.domain.call import CallRecord, PeerKind
from icehouse_server.domain.events import CacheReport, ReuseLimit, Started, Usage
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import EngineStats, Snapshot, TenantUse

from tests.rpc.fake_engine import MODEL_INFO

_numbers = itertools.count(1)


def filled(owner: type[Any], **given: Any) -> Any:
    """Return a dataclass whose numbers all differ; `given` fills what is no number."""
    values = {
        field.name: next(_numbers) for field in dataclasses.fields(owner) if field.type in ("int", "float")
    }
    return owner(**{**values, **given})


SNAPSHOT = Snapshot(
    state=EngineState.READY,
    heartbeat_age_s=0.25,
    sample_time=0.0,
    model=MODEL_INFO,
    engine=filled(EngineStats),
    cache=filled(
        CacheStats,
        ram=filled(TierStats, age=filled(AgePercentiles)),
        ssd=filled(TierStats, age=filled(AgePercentiles)),
        lookups=filled(
            LookupStats,
            miss_tokens=tuple(MissTokens(reason, next(_numbers)) for reason in ReuseLimit),
        ),
        spill=filled(SpillStats, drops=tuple(SpillDrops(cause, next(_numbers)) for cause in SpillDropCause)),
        promote=filled(PromoteStats),
        integrity=filled(IntegrityStats),
        disk=filled(DiskStats),
        tenants=(filled(TenantShare, tenant=Tenant("search")),),
    ),
    tenants=(filled(TenantUse, tenant=Tenant("search")), filled(TenantUse, tenant=Tenant("ads"))),
)

EMPTY = Snapshot(EngineState.LOADING, heartbeat_age_s=0.0, sample_time=0.0)

REPORT = CacheReport(ram_token_count=256, ssd_token_count=512, restore_s=0.5, limit=ReuseLimit.DIVERGED)

USAGE = Usage(
    prompt_token_count=1000,
    output_token_count=21,
    cache=REPORT,
    queue_s=0.25,
    prefill_s=1.25,
    decode_s=2.0,
    ttft_s=2.0,
    total_s=4.0,
)


def call_record(**changes: Any) -> CallRecord:
    """Return a finished Stream with every stage."""
    record = CallRecord(
        method="icehouse.v1.InferenceService/Stream",
        code="OK",
        reason="",
        request_id="r1",
        peer=PeerKind.LOOPBACK,
        tenant="blue",
        model_id="tiny",
        start_time=1_700_000_000.0,
        duration_s=4.125,
        tokenize_s=0.0625,
        prompt_token_count=1000,
        started=Started(1000, REPORT, 0.25),
        usage=USAGE,
    )
    return dataclasses.replace(record, **changes)
