"""Metrics table: every metric that the server has. The endpoint, the documentation and the checks read it.

`call_metrics` counts calls when they end; the rows here read everything else from the latest snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from icehouse_server.domain.cache_stats import CacheStats, DiskStats, SharedStats, SpillStats, TierStats
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import (
    EngineStats,
    KvEventStats,
    RankState,
    RankStats,
    RankTierStats,
    ReplyStats,
    StatsSnapshot,
    TenantUse,
)
from icehouse_server.telemetry.call_metrics import CALL_METRICS
from icehouse_server.telemetry.metric import Metric, MetricKind

Labels = tuple[str, ...]

Reading = float | Mapping[str | Labels, float]
"""One number, or one for each value of the row's labels."""

_Part = TypeVar("_Part")
_Read = Callable[[_Part], Reading]


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedMetric:
    """One row of the table. `read` yields values with their labels, none if the snapshot has no such data."""

    metric: Metric
    read: Callable[[StatsSnapshot], Iterable[tuple[Labels, float]]]
    is_of_model: bool = True
    """Whether each loaded model has its own values, if there may be several."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows(Generic[_Part]):
    """Makes rows that read a part of the snapshot. There may be several parts, distinguished by `labels`."""

    parts: Callable[[StatsSnapshot], Mapping[Labels, _Part]]
    labels: Labels = ()
    is_of_model: bool = True

    def counter(
        self, name: str, unit: str, read: _Read[_Part], description: str, *labels: str
    ) -> ObservedMetric:
        return self._row(Metric(name, MetricKind.COUNTER, unit, description, (*self.labels, *labels)), read)

    def gauge(
        self, name: str, unit: str, read: _Read[_Part], description: str, *labels: str
    ) -> ObservedMetric:
        return self._row(Metric(name, MetricKind.GAUGE, unit, description, (*self.labels, *labels)), read)

    def _row(self, metric: Metric, read: _Read[_Part]) -> ObservedMetric:
        return ObservedMetric(metric, lambda s: self._values(s, read), self.is_of_model)

    def _values(self, s: StatsSnapshot, read: _Read[_Part]) -> Iterator[tuple[Labels, float]]:
        for of_part, part in self.parts(s).items():
            reading = read(part)
            if isinstance(reading, Mapping):
                for label, value in reading.items():
                    yield (*of_part, *((label,) if isinstance(label, str) else label)), value
            else:
                yield of_part, reading


def _known(part: _Part | None) -> Mapping[Labels, _Part]:
    return {} if part is None else {(): part}


def _tiers(s: StatsSnapshot) -> Mapping[Labels, TierStats]:
    tiers = {} if s.cache is None else {("ram",): s.cache.ram, ("ssd",): s.cache.ssd}
    return {label: tier for label, tier in tiers.items() if tier is not None}


def _ranks(s: StatsSnapshot) -> Mapping[Labels, RankStats]:
    return {} if s.group is None else {(str(rank.rank),): rank for rank in s.group.ranks}


def _stored(s: StatsSnapshot) -> Reading:
    # The cache may remember other tenants; those without an account are left out, to keep the bound.
    known = {use.tenant for use in s.tenants}
    shares = [share for share in (s.cache.tenants if s.cache else ()) if share.tenant in known]
    return {
        (share.tenant, tier): size
        for share in shares
        for tier, size in (("ram", share.ram_bytes), ("ssd", share.ssd_bytes))
    }


def _model(s: StatsSnapshot) -> Reading:
    m = s.model
    facts = m and (m.model_id, m.architecture, m.dtype, m.device, m.fingerprint_hex[:16])
    return {facts: 1.0} if facts else {}


_server: _Rows[StatsSnapshot] = _Rows(lambda s: {(): s})
_engine: _Rows[EngineStats] = _Rows(lambda s: _known(s.engine))
_cache: _Rows[CacheStats] = _Rows(lambda s: _known(s.cache))
_spill: _Rows[SpillStats] = _Rows(lambda s: _known(s.cache.spill if s.cache else None))
_disk: _Rows[DiskStats] = _Rows(lambda s: _known(s.cache.disk if s.cache else None))
_shared: _Rows[SharedStats] = _Rows(lambda s: _known(s.cache.shared if s.cache else None))
_tier: _Rows[TierStats] = _Rows(_tiers, ("icehouse.tier",))
# The edge keeps a bounded number of accounts, which bounds the tenants here.
_tenant: _Rows[TenantUse] = _Rows(
    lambda s: {(use.tenant,): use for use in s.tenants}, ("icehouse.tenant",), is_of_model=False
)
_rank: _Rows[RankStats] = _Rows(_ranks, ("icehouse.rank",), is_of_model=False)
_rank_tier: _Rows[RankTierStats] = _Rows(
    lambda s: {label: rank.ssd for label, rank in _ranks(s).items() if rank.ssd is not None},
    ("icehouse.rank",),
    is_of_model=False,
)
_events: _Rows[KvEventStats] = _Rows(lambda s: {(): s.kv_events}, is_of_model=False)
_replies: _Rows[ReplyStats] = _Rows(lambda s: {(): s.replies}, is_of_model=False)

# fmt: off
# Each row has name, unit and reading, and below them what it means.
OBSERVED_METRICS: tuple[ObservedMetric, ...] = (
    _server.gauge("icehouse.engine.state", "{state}",
        lambda s: {state.name.lower(): float(s.state is state) for state in EngineState},
        "1 for the engine's current state.", "icehouse.state"),
    _server.gauge("icehouse.model.info", "{model}", _model,
        "Always 1, with the served model's facts as labels.",
        "model", "architecture", "dtype", "device", "fingerprint"),
    _server.gauge("icehouse.engine.heartbeat.age", "s", lambda s: s.heartbeat_age_s,
        "Time since the inference loop last ran; it grows while a step is stuck."),
    _engine.gauge("icehouse.engine.uptime", "s", lambda e: e.uptime_s,
        "Time since the engine started."),
    _engine.gauge("icehouse.engine.requests", "{request}",
        lambda e: {"waiting": e.waiting_count, "loading": e.loading_count,
                   "prefilling": e.prefilling_count, "decoding": e.decoding_count},
        "Requests by phase.", "icehouse.phase"),
    _engine.gauge("icehouse.engine.running", "{request}", lambda e: e.running_count,
        "Requests admitted and not ended: loading, prefilling or decoding."),
    _engine.gauge("icehouse.engine.kv.usage", "1", lambda e: e.kv_usage_ratio,
        "Share of the memory for KV that running requests use; 0 without a limit."),
    _engine.gauge("icehouse.engine.kv.used", "By", lambda e: e.kv_used_bytes,
        "KV of running requests, with the space reserved for its growth; without the prefix cache."),
    _engine.gauge("icehouse.engine.kv.limit", "By", lambda e: e.kv_limit_bytes,
        "Memory for KV beside the model; 0 is unlimited."),
    _engine.gauge("icehouse.engine.waiting.limit", "{request}", lambda e: e.waiting_limit,
        "Maximum waiting requests; more are refused with QUEUE_FULL."),
    _engine.gauge("icehouse.engine.decoding.limit", "{request}", lambda e: e.decoding_limit,
        "Maximum requests that decode at once."),
    _engine.gauge("icehouse.engine.mailbox.messages", "{message}", lambda e: e.mailbox_count,
        "Messages waiting for the inference thread."),
    _engine.gauge("icehouse.engine.mailbox.limit", "{message}", lambda e: e.mailbox_limit,
        "Maximum messages waiting for the inference thread."),
    _engine.counter("icehouse.engine.requests.accepted", "{request}", lambda e: e.accepted_total,
        "Requests accepted."),
    _engine.counter("icehouse.engine.requests.ended", "{request}",
        lambda e: {"finished": e.finished_total, "cancelled": e.cancelled_total,
                   "failed": e.failed_total, "rejected": e.rejected_total},
        "Requests ended.", "icehouse.outcome"),
    _engine.counter("icehouse.engine.requests.parked", "{request}", lambda e: e.parked_total,
        "Times a running request was preempted for lack of memory and continued later."),
    _engine.counter("icehouse.engine.draft.tokens", "{token}",
        lambda e: {"accepted": e.accepted_draft_token_total,
                   "rejected": e.drafted_token_total - e.accepted_draft_token_total},
        "Draft tokens of speculation, by outcome.", "icehouse.outcome"),
    _engine.counter("icehouse.engine.images", "{image}",
        lambda e: {"encoded": e.encoded_image_total, "reused": e.reused_image_total},
        "Images in prompts, by where their vectors came from.", "icehouse.kind"),
    _engine.counter("icehouse.engine.image.encode.time", "s", lambda e: e.image_encode_s,
        "Time that the inference thread spent in the vision tower."),
    _engine.gauge("icehouse.engine.image.features", "By", lambda e: e.image_feature_bytes,
        "Vectors kept for images that may be used again."),
    _engine.gauge("icehouse.engine.image.features.limit", "By", lambda e: e.image_feature_limit_bytes,
        "Maximum of these vectors."),
    _engine.counter("icehouse.engine.tokens", "{token}",
        lambda e: {"prompt_cached": e.cached_token_total, "prompt_computed": e.prefilled_token_total,
                   "output": e.output_token_total},
        "Tokens by kind: prompt tokens cached or computed, and output.", "icehouse.kind"),
    _engine.counter("icehouse.engine.steps", "{step}", lambda e: e.step_total,
        "Steps of the engine's loop."),
    _engine.gauge("icehouse.engine.decode.step", "s",
        lambda e: {"0.5": e.decode_step_p50_s, "0.99": e.decode_step_p99_s},
        "Duration of a decode step, quantiles of a recent window.", "quantile"),
    _engine.gauge("icehouse.engine.pass", "s",
        lambda e: {"0.5": e.pass_p50_s, "0.99": e.pass_p99_s},
        "Duration of a forward pass, quantiles of a recent window; a new request waits for the one running.",
        "quantile"),
    _engine.gauge("icehouse.engine.prefill.rate", "{token}/s", lambda e: e.prefill_tokens_per_s,
        "Prompt tokens computed per second of prefill, a moving average."),
    _engine.gauge("icehouse.engine.memory.active", "By", lambda e: e.active_memory_bytes,
        "Memory that MLX holds for arrays."),
    _engine.gauge("icehouse.engine.memory.peak", "By", lambda e: e.peak_memory_bytes,
        "Peak memory that MLX held for arrays since the start."),
    _engine.gauge("icehouse.engine.memory.limit", "By", lambda e: e.memory_limit_bytes,
        "Memory that the engine may use; 0 is unlimited."),

    _tier.gauge("icehouse.cache.blocks", "{block}", lambda t: t.block_count,
        "Blocks."),
    _tier.gauge("icehouse.cache.blocks.pinned", "{block}", lambda t: t.pinned_block_count,
        "Pinned blocks, which policy does not evict."),
    _tier.gauge("icehouse.cache.tokens", "{token}", lambda t: t.token_count,
        "Tokens in blocks."),
    _tier.gauge("icehouse.cache.size", "By", lambda t: t.size_bytes,
        "Bytes of the blocks."),
    _tier.gauge("icehouse.cache.limit", "By", lambda t: t.limit_bytes,
        "Maximum bytes of the blocks."),
    _tier.gauge("icehouse.cache.age.median", "s", lambda t: t.age.p50_s,
        "Median time since a block was last used."),
    _tier.counter("icehouse.cache.evicted.blocks", "{block}", lambda t: t.evicted_block_total,
        "Blocks evicted by policy."),
    _tier.counter("icehouse.cache.evicted", "By", lambda t: t.evicted_byte_total,
        "Bytes evicted by policy."),
    _tier.counter("icehouse.cache.purged.blocks", "{block}", lambda t: t.purged_block_total,
        "Blocks removed on request."),
    _cache.counter("icehouse.cache.lookups", "{lookup}", lambda c: c.lookups.lookup_total,
        "Prompts looked up."),
    _cache.counter("icehouse.cache.hits", "{lookup}", lambda c: c.lookups.hit_total,
        "Lookups that reused at least one token."),
    _cache.counter("icehouse.cache.reused.tokens", "{token}",
        lambda c: {"ram": c.lookups.ram_token_total, "ssd": c.lookups.ssd_token_total},
        "Prompt tokens reused.", "icehouse.tier"),
    _cache.counter("icehouse.cache.missed.tokens", "{token}",
        lambda c: {miss.reason.name.lower(): miss.token_total for miss in c.lookups.miss_tokens},
        "Prompt tokens not reused; reason none is the last token, which always runs.", "icehouse.reason"),
    _cache.counter("icehouse.cache.recompute.chosen", "{lookup}", lambda c: c.promote.recompute_chosen_total,
        "Lookups where prefilling was predicted to be faster than loading."),
    _spill.counter("icehouse.cache.spill.accepted.blocks", "{block}", lambda p: p.accepted_block_total,
        "Blocks accepted into the write queue."),
    _spill.counter("icehouse.cache.spill.persisted.blocks", "{block}", lambda p: p.persisted_block_total,
        "Blocks committed on SSD, with file and manifest row."),
    _spill.counter("icehouse.cache.spill.persisted", "By", lambda p: p.persisted_byte_total,
        "Bytes of the committed files."),
    _spill.counter("icehouse.cache.spill.dropped.blocks", "{block}",
        lambda p: {drop.cause.name.lower(): drop.block_total for drop in p.drops},
        "Blocks that did not reach the SSD.", "icehouse.cause"),
    _spill.gauge("icehouse.cache.spill.queue", "By", lambda p: p.queue_bytes,
        "Bytes queued for writing to SSD."),
    _spill.gauge("icehouse.cache.spill.queue.limit", "By", lambda p: p.queue_limit_bytes,
        "Maximum bytes queued for writing to SSD."),
    _spill.gauge("icehouse.cache.spill.rate", "By/s", lambda p: p.write_bytes_per_s,
        "Bytes written per second of writing, a moving average."),
    _spill.gauge("icehouse.cache.spill.today", "By", lambda p: p.written_today_bytes,
        "Bytes written since midnight UTC."),
    _spill.gauge("icehouse.cache.spill.daily.limit", "By", lambda p: p.daily_limit_bytes,
        "Maximum bytes written in a day; 0 is unlimited."),
    _spill.counter("icehouse.cache.spill.behind.blocks", "{block}", lambda p: p.behind_block_total,
        "Blocks written to SSD while the disk was idle, before RAM needed their space."),
    _spill.counter("icehouse.cache.spill.behind", "By", lambda p: p.behind_byte_total,
        "Bytes of the files written while the disk was idle."),
    _spill.gauge("icehouse.cache.spill.behind.waiting", "{block}", lambda p: p.behind_waiting_count,
        "Blocks waiting to be written while the disk is idle, or being written."),
    _cache.counter("icehouse.cache.loads", "{load}", lambda c: c.promote.load_total,
        "Loads requested from the SSD tier."),
    _cache.counter("icehouse.cache.loads.failed", "{load}", lambda c: c.promote.failed_load_total,
        "Loads that failed wholly or in part."),
    _cache.counter("icehouse.cache.restores.failed", "{restore}", lambda c: c.promote.failed_restore_total,
        "Restores that failed although their blocks were read; the request was prefilled."),
    _cache.counter("icehouse.cache.promoted.blocks", "{block}", lambda c: c.promote.promoted_block_total,
        "Blocks rebuilt for use."),
    _cache.counter("icehouse.cache.read", "By", lambda c: c.promote.read_byte_total,
        "Bytes read from SSD."),
    _cache.gauge("icehouse.cache.loads.queued", "{load}", lambda c: c.promote.queue_count,
        "Loads waiting or running."),
    _cache.gauge("icehouse.cache.read.rate", "By/s", lambda c: c.promote.read_bytes_per_s,
        "Bytes read and verified per second of reading, a moving average."),
    _cache.counter("icehouse.cache.damaged.blocks", "{block}",
        lambda c: {"checksum": c.integrity.checksum_failure_total,
                   "header": c.integrity.header_mismatch_total,
                   "missing": c.integrity.missing_file_total, "seal": c.integrity.seal_failure_total},
        "Blocks on SSD found damaged; they are never used.", "icehouse.damage"),
    _cache.gauge("icehouse.cache.quarantined.files", "{file}", lambda c: c.integrity.quarantined_file_count,
        "Files in quarantine."),
    _cache.counter("icehouse.cache.quarantined.blocks", "{block}",
        lambda c: c.integrity.quarantined_block_total,
        "Blocks whose files were put into quarantine."),
    _cache.gauge("icehouse.cache.sessions", "{session}", lambda c: c.sessions.session_count,
        "Sessions tracked."),
    _cache.gauge("icehouse.cache.sessions.over", "{session}", lambda c: c.sessions.ended_count,
        "Of these, sessions that have ended."),
    _cache.gauge("icehouse.cache.sessions.children", "{session}", lambda c: c.sessions.child_count,
        "Of these, sessions started by another one."),
    _cache.counter("icehouse.cache.sessions.ended", "{session}", lambda c: c.sessions.ended_total,
        "Times a session ended, by EndSession or with its last request."),
    _cache.counter("icehouse.cache.sessions.forgotten", "{session}", lambda c: c.sessions.forgotten_total,
        "Sessions no longer tracked, because there were too many."),
    _cache.counter("icehouse.cache.sessions.released.blocks", "{block}",
        lambda c: c.sessions.released_block_total,
        "Blocks moved to the front of the eviction order when their session ended."),
    _cache.counter("icehouse.cache.checkpoints.dropped", "{checkpoint}",
        lambda c: c.sessions.dropped_checkpoint_total,
        "Checkpoints dropped because their session had too many."),
    _cache.counter("icehouse.cache.prefetch.prompts", "{prompt}",
        lambda c: {"done": c.prefetch.done_total, "given_up": c.prefetch.given_up_total},
        "Prompts computed ahead for sessions' next turns while nothing else ran.", "icehouse.outcome"),
    _cache.counter("icehouse.cache.prefetch.tokens", "{token}", lambda c: c.prefetch.computed_token_total,
        "Tokens computed ahead for next turns."),
    _cache.counter("icehouse.cache.prefetch.used.tokens", "{token}", lambda c: c.prefetch.used_token_total,
        "Of these, tokens that a later request reused."),
    _disk.gauge("icehouse.cache.disk.used", "By", lambda d: d.used_bytes,
        "Bytes of all files in the SSD tier's folder."),
    _disk.gauge("icehouse.cache.disk.blocks", "By",
        lambda d: {"stored": d.block_bytes, "raw": d.raw_block_bytes},
        "Bytes of the blocks' files, and of their tensors before compression.", "icehouse.cache.size.kind"),
    _disk.gauge("icehouse.cache.disk.decompress.rate", "By/s", lambda d: d.decompress_bytes_per_s,
        "Bytes of tensors decompressed per second by readers, a moving average."),
    _disk.gauge("icehouse.cache.disk.limit", "By", lambda d: d.limit_bytes,
        "Maximum bytes of all files in the SSD tier's folder."),
    _disk.gauge("icehouse.cache.disk.free", "By", lambda d: d.free_bytes,
        "Free bytes of the file system."),
    _disk.gauge("icehouse.cache.disk.floor", "By", lambda d: d.free_floor_bytes,
        "Free bytes below which nothing is written."),
    _disk.gauge("icehouse.cache.disk.writable", "{state}", lambda d: float(not d.writes_off_detail),
        "1 while blocks are written, 0 while writing is off after failures."),
    _disk.gauge("icehouse.cache.disk.answering", "{state}", lambda d: float(not d.hang_detail),
        "1 while the disk answers, 0 while reads or writes hang and prompts are computed instead."),
    _shared.counter("icehouse.cache.shared.lookups", "{lookup}", lambda x: x.lookup_total,
        "Prompts whose missing blocks were looked up in the object store."),
    _shared.counter("icehouse.cache.shared.hits", "{lookup}", lambda x: x.hit_total,
        "Object-store lookups that found at least one block."),
    _shared.counter("icehouse.cache.shared.late", "{lookup}", lambda x: x.late_lookup_total,
        "Object-store lookups not fully answered in time."),
    _shared.counter("icehouse.cache.shared.fetched.blocks", "{block}", lambda x: x.fetched_block_total,
        "Blocks fetched from the object store."),
    _shared.counter("icehouse.cache.shared.fetched", "By", lambda x: x.fetched_byte_total,
        "Bytes of the blocks fetched from the object store."),
    _shared.gauge("icehouse.cache.shared.fetch.rate", "By/s", lambda x: x.fetch_bytes_per_s,
        "Bytes fetched per second of fetching, a moving average."),
    _shared.counter("icehouse.cache.shared.refused.blocks", "{block}", lambda x: x.refused_block_total,
        "Fetched objects that were damaged or not the block of their name; none was used."),
    _shared.counter("icehouse.cache.shared.stored.blocks", "{block}", lambda x: x.stored_block_total,
        "Blocks stored in the object store."),
    _shared.counter("icehouse.cache.shared.stored", "By", lambda x: x.stored_byte_total,
        "Bytes stored in the object store."),
    _shared.counter("icehouse.cache.shared.known.blocks", "{block}", lambda x: x.known_block_total,
        "Blocks that were already in the object store."),
    _shared.counter("icehouse.cache.shared.dropped.blocks", "{block}", lambda x: x.dropped_block_total,
        "Blocks not stored in the object store: too many were waiting, or they had left this server."),
    _shared.counter("icehouse.cache.shared.deleted.blocks", "{block}", lambda x: x.deleted_block_total,
        "Objects deleted on request."),
    _shared.gauge("icehouse.cache.shared.waiting", "{block}", lambda x: x.queue_count,
        "Blocks waiting to be stored."),
    _shared.counter("icehouse.cache.shared.failures", "{request}", lambda x: x.failure_total,
        "Requests that the object store refused or did not answer."),
    _shared.gauge("icehouse.cache.shared.readable", "{state}", lambda x: float(not x.read_pause_detail),
        "1 while the object store is read, 0 while reading is paused after failures."),
    _shared.gauge("icehouse.cache.shared.writable", "{state}", lambda x: float(not x.write_pause_detail),
        "1 while blocks are stored there, 0 while storing is paused after failures."),

    _tenant.gauge("icehouse.tenant.requests", "{request}",
        lambda use: {"waiting": use.waiting_count, "running": use.running_count},
        "Requests waiting or running.", "icehouse.request.phase"),
    _tenant.counter("icehouse.tenant.accepted", "{request}", lambda use: use.accepted_total,
        "Requests that were let into the queue."),
    _tenant.counter("icehouse.tenant.refused", "{request}", lambda use: use.refused_total,
        "Requests refused because the tenant had used up its share."),
    _tenant.counter("icehouse.tenant.tokens", "{token}",
        lambda use: {"prompt": use.prompt_token_total, "cached": use.cached_token_total,
                     "output": use.output_token_total},
        "Tokens by kind: prompt, reused of the prompt, and output.", "icehouse.token.kind"),
    _server.gauge("icehouse.tenant.stored", "By", _stored,
        "Bytes of the tenant's blocks.", "icehouse.tenant", "icehouse.tier"),

    _rank.gauge("icehouse.rank.state", "{state}",
        lambda r: {state.name.lower(): float(r.state is state) for state in RankState},
        "1 for the current state of a machine of the group. Without a group there are no metrics of ranks.",
        "icehouse.state"),
    _rank.gauge("icehouse.rank.report.age", "s",
        lambda r: {} if r.report_age_s is None else r.report_age_s,
        "Time since a rank's last report; not for rank 0."),
    _rank.counter("icehouse.rank.orders", "{order}", lambda r: r.order_total,
        "Orders that a rank has carried out; for rank 0, all that it gave."),
    _rank.gauge("icehouse.rank.orders.behind", "{order}", lambda r: r.behind_order_count,
        "Orders that a rank had not carried out when it reported."),
    _rank.gauge("icehouse.rank.memory.active", "By", lambda r: r.active_memory_bytes,
        "Device memory in use on a rank."),
    _rank.gauge("icehouse.rank.memory.limit", "By", lambda r: r.memory_limit_bytes,
        "Device memory that a rank may use; 0 is unlimited."),
    _rank.gauge("icehouse.rank.ssd.sound", "{state}", lambda r: float(not r.ssd_trouble),
        "1 while a rank's SSD tier has no known trouble."),
    _rank_tier.gauge("icehouse.rank.ssd.blocks", "{block}", lambda t: t.block_count,
        "Blocks of the model on a rank's SSD."),
    _rank_tier.gauge("icehouse.rank.ssd.size", "By", lambda t: t.size_bytes,
        "Bytes of all models' blocks on a rank's SSD."),
    _rank_tier.gauge("icehouse.rank.ssd.limit", "By", lambda t: t.limit_bytes,
        "Maximum bytes of these blocks."),
    _rank_tier.counter("icehouse.rank.ssd.written.blocks", "{block}", lambda t: t.written_block_total,
        "Blocks that a rank wrote to its SSD."),
    _rank_tier.counter("icehouse.rank.ssd.written", "By", lambda t: t.written_byte_total,
        "Bytes that a rank wrote to its SSD."),
    _rank_tier.counter("icehouse.rank.ssd.dropped.blocks", "{block}", lambda t: t.dropped_block_total,
        "Blocks that a rank should have written but did not."),
    _rank_tier.counter("icehouse.rank.ssd.read", "By", lambda t: t.read_byte_total,
        "Bytes that a rank read from its SSD."),
    _rank_tier.counter("icehouse.rank.ssd.evicted.blocks", "{block}", lambda t: t.evicted_block_total,
        "Blocks that a rank evicted from its SSD to stay within its limits."),
    _rank_tier.counter("icehouse.rank.ssd.damaged.blocks", "{block}", lambda t: t.damaged_block_total,
        "Blocks that a rank found damaged or missing on its SSD."),

    _events.gauge("icehouse.kv_events.blocks", "{block}", lambda v: v.block_count,
        "Whole blocks in either tier, as reported to subscribers; `kv_events.block_limit` limits them."),
    _events.gauge("icehouse.kv_events.replay", "By", lambda v: v.replay_bytes,
        "Events kept for subscribers that fall behind or reconnect; `kv_events.replay_bytes` limits them."),
    _events.counter("icehouse.kv_events.events", "{event}", lambda v: v.event_total,
        "KV events published."),
    _events.counter("icehouse.kv_events.subscribers.lost", "{subscriber}", lambda v: v.lost_total,
        "Times a subscriber fell behind the kept events and had to start over."),
    _events.counter("icehouse.kv_events.blocks.untold", "{block}", lambda v: v.untold_total,
        "Blocks not published because of `kv_events.block_limit`."),

    _replies.gauge("icehouse.replies.remembered", "{reply}", lambda v: v.reply_count,
        "Earlier replies kept for stable prompts."),
    _replies.gauge("icehouse.replies.memory", "By", lambda v: v.size_bytes,
        "Memory of these replies; `server.reply_memory_bytes` limits it."),
    _replies.counter("icehouse.replies.found", "{prompt}", lambda v: v.found_total,
        "Prompts that contained a kept reply."),
)
# fmt: on

METRICS: tuple[Metric, ...] = (*CALL_METRICS, *(row.metric for row in OBSERVED_METRICS))
