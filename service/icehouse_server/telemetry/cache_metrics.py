"""Cache metrics: the table that names each counter of `CacheStats`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from icehouse_server.domain.cache_stats import CacheStats, DiskStats, TierStats
from icehouse_server.domain.stats import Snapshot
from icehouse_server.telemetry.observed import Observed, Value, counter, gauge, one

_Read = Callable[[Snapshot], Iterable[Value]]

_TIER = "icehouse.tier"


def _cache(read: Callable[[CacheStats], float]) -> _Read:
    return lambda s: one(None if s.cache is None else read(s.cache))


def _disk(read: Callable[[DiskStats], float]) -> _Read:
    return lambda s: one(None if s.cache is None or s.cache.disk is None else read(s.cache.disk))


def _tier(read: Callable[[TierStats], float]) -> _Read:
    def values(s: Snapshot) -> Iterable[Value]:
        if s.cache is not None:
            yield ("ram",), read(s.cache.ram)
            if s.cache.ssd is not None:
                yield ("ssd",), read(s.cache.ssd)

    return values


def _reused(s: Snapshot) -> Iterable[Value]:
    if s.cache is not None:
        yield ("ram",), s.cache.lookups.ram_token_total
        yield ("ssd",), s.cache.lookups.ssd_token_total


def _missed(s: Snapshot) -> Iterable[Value]:
    for miss in s.cache.lookups.miss_tokens if s.cache is not None else ():
        yield (miss.reason.name.lower(),), miss.token_total


def _drops(s: Snapshot) -> Iterable[Value]:
    for drop in s.cache.spill.drops if s.cache is not None else ():
        yield (drop.cause.name.lower(),), drop.block_total


def _damage(s: Snapshot) -> Iterable[Value]:
    if s.cache is not None:
        found = s.cache.integrity
        yield ("checksum",), found.checksum_failure_total
        yield ("header",), found.header_mismatch_total
        yield ("missing",), found.missing_file_total
        yield ("seal",), found.seal_failure_total


_TIERS = (
    gauge("icehouse.cache.blocks", "{block}", "Blocks.", _tier(lambda t: t.block_count), _TIER),
    gauge(
        "icehouse.cache.blocks.pinned",
        "{block}",
        "Blocks that policy may not evict.",
        _tier(lambda t: t.pinned_block_count),
        _TIER,
    ),
    gauge("icehouse.cache.tokens", "{token}", "Tokens in blocks.", _tier(lambda t: t.token_count), _TIER),
    gauge("icehouse.cache.size", "By", "Bytes of the blocks.", _tier(lambda t: t.size_bytes), _TIER),
    gauge("icehouse.cache.limit", "By", "Most bytes.", _tier(lambda t: t.limit_bytes), _TIER),
    gauge(
        "icehouse.cache.age.median",
        "s",
        "Half of the blocks were used more recently.",
        _tier(lambda t: t.age.p50_s),
        _TIER,
    ),
    counter(
        "icehouse.cache.evicted.blocks",
        "{block}",
        "Blocks evicted by policy.",
        _tier(lambda t: t.evicted_block_total),
        _TIER,
    ),
    counter(
        "icehouse.cache.evicted",
        "By",
        "Bytes evicted by policy.",
        _tier(lambda t: t.evicted_byte_total),
        _TIER,
    ),
    counter(
        "icehouse.cache.purged.blocks",
        "{block}",
        "Blocks removed by order.",
        _tier(lambda t: t.purged_block_total),
        _TIER,
    ),
)

_LOOKUPS = (
    counter(
        "icehouse.cache.lookups",
        "{lookup}",
        "Prompts looked up.",
        _cache(lambda c: c.lookups.lookup_total),
    ),
    counter(
        "icehouse.cache.hits",
        "{lookup}",
        "Lookups that reused at least one token.",
        _cache(lambda c: c.lookups.hit_total),
    ),
    counter("icehouse.cache.reused.tokens", "{token}", "Prompt tokens reused.", _reused, _TIER),
    counter(
        "icehouse.cache.missed.tokens",
        "{token}",
        "Prompt tokens not reused; reason none is the last token, which always runs.",
        _missed,
        "icehouse.reason",
    ),
    counter(
        "icehouse.cache.recompute.chosen",
        "{lookup}",
        "Lookups in which prefilling was predicted to be faster than loading.",
        _cache(lambda c: c.promote.recompute_chosen_total),
    ),
)

_SPILL = (
    counter(
        "icehouse.cache.spill.accepted.blocks",
        "{block}",
        "Blocks that got credit in the write queue.",
        _cache(lambda c: c.spill.accepted_block_total),
    ),
    counter(
        "icehouse.cache.spill.persisted.blocks",
        "{block}",
        "Blocks committed on SSD: file and row are there.",
        _cache(lambda c: c.spill.persisted_block_total),
    ),
    counter(
        "icehouse.cache.spill.persisted",
        "By",
        "Bytes of the committed files.",
        _cache(lambda c: c.spill.persisted_byte_total),
    ),
    counter(
        "icehouse.cache.spill.dropped.blocks",
        "{block}",
        "Blocks that did not reach the SSD.",
        _drops,
        "icehouse.cause",
    ),
    gauge(
        "icehouse.cache.spill.queue",
        "By",
        "Bytes on their way to SSD.",
        _cache(lambda c: c.spill.queue_bytes),
    ),
    gauge(
        "icehouse.cache.spill.queue.limit",
        "By",
        "Most bytes on their way to SSD.",
        _cache(lambda c: c.spill.queue_limit_bytes),
    ),
    gauge(
        "icehouse.cache.spill.rate",
        "By/s",
        "Bytes written per second of writing, a moving average.",
        _cache(lambda c: c.spill.write_bytes_per_s),
    ),
    gauge(
        "icehouse.cache.spill.today",
        "By",
        "Bytes written since midnight UTC.",
        _cache(lambda c: c.spill.written_today_bytes),
    ),
    gauge(
        "icehouse.cache.spill.daily.limit",
        "By",
        "Most bytes written in a day; 0 is unlimited.",
        _cache(lambda c: c.spill.daily_limit_bytes),
    ),
)

_PROMOTE = (
    counter(
        "icehouse.cache.loads",
        "{load}",
        "Loads asked of the SSD tier.",
        _cache(lambda c: c.promote.load_total),
    ),
    counter(
        "icehouse.cache.loads.failed",
        "{load}",
        "Loads that failed wholly or in part.",
        _cache(lambda c: c.promote.failed_load_total),
    ),
    counter(
        "icehouse.cache.restores.failed",
        "{restore}",
        "Restores whose blocks were read and did not make a cache; the request was prefilled.",
        _cache(lambda c: c.promote.failed_restore_total),
    ),
    counter(
        "icehouse.cache.promoted.blocks",
        "{block}",
        "Blocks rebuilt for use.",
        _cache(lambda c: c.promote.promoted_block_total),
    ),
    counter("icehouse.cache.read", "By", "Bytes read.", _cache(lambda c: c.promote.read_byte_total)),
    gauge(
        "icehouse.cache.loads.queued",
        "{load}",
        "Loads waiting or running.",
        _cache(lambda c: c.promote.queue_count),
    ),
    gauge(
        "icehouse.cache.read.rate",
        "By/s",
        "Bytes read and verified per second of reading, a moving average.",
        _cache(lambda c: c.promote.read_bytes_per_s),
    ),
)

_DISK = (
    counter(
        "icehouse.cache.damaged.blocks",
        "{block}",
        "Blocks on SSD found damaged; they are never used.",
        _damage,
        "icehouse.damage",
    ),
    gauge(
        "icehouse.cache.quarantined.files",
        "{file}",
        "Files in quarantine.",
        _cache(lambda c: c.integrity.quarantined_file_count),
    ),
    counter(
        "icehouse.cache.quarantined.blocks",
        "{block}",
        "Blocks whose files were put into quarantine.",
        _cache(lambda c: c.integrity.quarantined_block_total),
    ),
    gauge("icehouse.cache.disk.used", "By", "Bytes of all files.", _disk(lambda d: d.used_bytes)),
    gauge("icehouse.cache.disk.limit", "By", "Most bytes of all files.", _disk(lambda d: d.limit_bytes)),
    gauge("icehouse.cache.disk.free", "By", "Free on the file system.", _disk(lambda d: d.free_bytes)),
    gauge(
        "icehouse.cache.disk.floor",
        "By",
        "Free bytes below which nothing is written.",
        _disk(lambda d: d.free_floor_bytes),
    ),
    gauge(
        "icehouse.cache.disk.writable",
        "{state}",
        "1 while blocks are written, 0 while writing is off after failures.",
        _disk(lambda d: float(not d.writes_off_detail)),
    ),
    gauge(
        "icehouse.cache.disk.answering",
        "{state}",
        "1 while the disk answers, 0 while reads or writes hang and prompts are computed instead.",
        _disk(lambda d: float(not d.hang_detail)),
    ),
)

CACHE_METRICS: tuple[Observed, ...] = (*_TIERS, *_LOOKUPS, *_SPILL, *_PROMOTE, *_DISK)
