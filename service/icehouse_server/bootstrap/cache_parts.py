"""Composition of the prefix cache: budgets, fingerprint, SSD tier, controller."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from icehouse_server.bootstrap.encryption import open_cipher
from icehouse_server.bootstrap.group.leading import LeaderParts, group_facts, with_rank
from icehouse_server.bootstrap.machine import cache_limit
from icehouse_server.bootstrap.room import existing_folder
from icehouse_server.clock import Clock
from icehouse_server.config import CacheConfig, Config, TenantConfig
from icehouse_server.device import Device
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings, QuotaLimits
from icehouse_server.engine.runner.encoder_runner import EncoderRunner
from icehouse_server.engine.runner.identity.fingerprint import ModelFingerprint, model_fingerprint
from icehouse_server.engine.runner.model_loader import AdapterSource, ModelSource
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.errors import ConfigError, Reason, StartError, imports_of_extra
from icehouse_server.group.leader_runner import LeaderRunner
from icehouse_server.storage.api import OVERHEAD_BYTES, ColdTier, Outcome
from icehouse_server.storage.digests import DigestBook
from icehouse_server.storage.files import Files, in_time
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.encryption.constants import KEY_DETAIL, Cipher, encrypted_fingerprint
from icehouse_server.storage.local.model_tiers import ModelTiers
from icehouse_server.storage.shared.object_store import ObjectStore, SharedSettings, make_store
from icehouse_server.storage.shared.shared_tier import SharedTier
from icehouse_server.storage.storage_settings import Codec, StorageSettings
from icehouse_server.storage.store_paths import StorePaths

_Post = Callable[[Outcome], object]
_AsGroup = Callable[[Callable[[_Post], ColdTier | None], _Post], ColdTier | None]

_log = logging.getLogger("icehouse.boot")

_MIN_REUSE_TOKEN_COUNT = 16
_LOAD_QUEUE_COUNT = 64
_TASK_QUEUE_COUNT = 4096
_SHARE_ON_SHARED_CORES = 0.07
"""Share of one core, if decode runs on the CPU. During continuous restores, p99 of decode was then 1.09 times
that without restores; with 0.15 it was 1.27, with readers at full speed 1.85 (`make bench CASE=cache`, 2 x86
cores)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheParts:
    """Settings and SSD tier of one model's prefix cache; `storage` is None without an SSD tier."""

    settings: PrefixSettings
    adopt_budget_s: float
    storage: ColdTier | None
    log: BlockLog = dataclasses.field(default_factory=BlockLog)
    """Blocks that enter and leave the tiers, for KV events."""

    def open_controller(
        self, runner: ModelRunner | EncoderRunner | LeaderRunner, clock: Clock
    ) -> CacheController:
        """Create the engine's side; on the inference thread, after the model was loaded."""
        cache = PrefixCache(
            settings=self.settings,
            facts=runner.blocks.facts,
            runner=runner.blocks,
            storage=self.storage,
            clock=clock,
            log=self.log,
        )
        return CacheController(
            cache=cache, runner=runner.blocks, clock=clock, adopt_budget_s=self.adopt_budget_s
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SsdParts:
    """The SSD tier of all models, and the cipher that encrypts their blocks there."""

    tiers: ModelTiers
    cipher: Cipher | None


def open_ssd(whole: Config, *, device: Device, clock: Clock) -> SsdParts | None:
    """Wire the SSD tier; None without one. `ModelTiers.start` locks and opens the directory.

    If encryption is configured, its data key is fetched here, since names and fingerprints depend on it;
    raises StartError.
    """
    config, files = whole.cache, Files()
    if not config.has_ssd:
        return None
    cipher = open_cipher(config, files, in_group=whole.group.hosts is not None)
    settings = StorageSettings(
        directory=str(config.block_directory),
        limit_bytes=config.ssd_bytes,
        free_floor_bytes=config.free_space_floor_bytes,
        daily_write_limit_bytes=config.daily_write_bytes,
        spill_queue_limit_bytes=config.write_queue_bytes,
        load_queue_limit_count=_LOAD_QUEUE_COUNT,
        task_queue_limit_count=_TASK_QUEUE_COUNT,
        reader_thread_count=config.reader_thread_count,
        share_beside_decode=_share_beside_decode(device),
        codec=codec_on(device, Codec(config.codec)),
    )
    return SsdParts(_make_tiers(config, settings, files=files, clock=clock, cipher=cipher), cipher)


def key_id_of(ssd: SsdParts | None) -> str:
    """Return the id of the data key that encrypts blocks; not secret."""
    return "none" if ssd is None or ssd.cipher is None else ssd.cipher.key_id.hex()


def with_key(fingerprint: ModelFingerprint, cipher: Cipher | None) -> ModelFingerprint:
    """Return the fingerprint for filing blocks: encrypted blocks get another one, so that nobody mistakes
    them for blocks that another key can open."""
    if cipher is None:
        return fingerprint
    return dataclasses.replace(
        fingerprint,
        value=encrypted_fingerprint(fingerprint.value, cipher.key_id),
        details={**fingerprint.details, KEY_DETAIL: cipher.key_id.hex()},
    )


def _share_beside_decode(device: Device) -> float:
    return 1.0 if device.is_gpu else _SHARE_ON_SHARED_CORES


def build_cache_parts(
    config: CacheConfig,
    tenants: TenantConfig,
    fingerprint: ModelFingerprint,
    ssd: SsdParts | None,
    *,
    adapters: Sequence[AdapterSource],
    device: Device,
    post: Callable[[Outcome], object],
    as_group: _AsGroup | None = None,
) -> CacheParts:
    """Wire one model's cache. `as_group` turns this rank's tier into the whole group's. Raises StartError if
    a model with the same fingerprint is open."""
    cipher = None if ssd is None else ssd.cipher
    filed_as = with_key(fingerprint, cipher)
    settings = PrefixSettings(
        fingerprint=filed_as.value,
        name_secret=cipher.name_secret if cipher else b"",
        block_token_count=config.block_token_count,
        is_enabled=config.enabled,
        ram_limit_bytes=cache_limit(config.ram_bytes, device),
        checkpoint_interval_tokens=config.checkpoint_interval_tokens,
        session_checkpoint_limit=config.session_checkpoint_limit,
        ssd_limit_bytes=config.ssd_bytes if config.has_ssd else 0,
        spill_policy=config.spill_policy,
        write_share_beside_passes=_share_beside_decode(device),
        min_prefix_token_count=config.min_prefix_token_count,
        may_recompute=config.restore_or_recompute,
        measured_on=measured_on(config, device),
        quotas=QuotaLimits(ram_bytes=tenants.ram_bytes, ssd_bytes=tenants.ssd_bytes),
        min_reuse_token_count=_MIN_REUSE_TOKEN_COUNT,
        adapters={adapter.name: adapter.digest for adapter in adapters},
    )

    def open_own(post: _Post) -> ColdTier | None:
        return None if ssd is None else ssd.tiers.open(filed_as.value, filed_as.details, post)

    storage = open_own(post) if as_group is None else as_group(open_own, post)
    return CacheParts(settings=settings, adopt_budget_s=config.adopt_budget_ms / 1000, storage=storage)


def measured_on(config: CacheConfig, device: Device) -> str:
    """Return what learned rates depend on, besides the model and its blocks."""
    codec = codec_on(device, Codec(config.codec))
    # A machine may have any name; this is stored as text.
    return ascii((platform.node(), device.backend.value, device.name, codec.value))


def _make_tiers(
    config: CacheConfig, settings: StorageSettings, *, files: Files, clock: Clock, cipher: Cipher | None
) -> ModelTiers:
    open_tiers = partial(ModelTiers, settings, files=files, clock=clock, cipher=cipher)
    if config.shared_url is None:
        return open_tiers()
    store, shared = open_shared_store(config), shared_settings(config)
    return open_tiers(make_tier=partial(SharedTier, store=store, shared=shared))


_SHARED_URL = "cache.shared_url"


def open_shared_store(cache: CacheConfig) -> ObjectStore:
    """Return the object store without contacting it: a store that is down stops no start. Raises ConfigError
    for a URL that names no store, or without the extra."""
    assert cache.shared_url is not None, "an object store is configured"
    try:
        with imports_of_extra("shared", setting=_SHARED_URL):
            return make_store(cache.shared_url)
    except ValueError as error:
        detail = f"{_SHARED_URL} = {cache.shared_url} is not the URL of an object store: {error}"
        raise ConfigError(Reason.CONFIG_INVALID, detail, field=_SHARED_URL) from error


def shared_settings(cache: CacheConfig) -> SharedSettings:
    """Return the traffic limits of the object store."""
    return SharedSettings(
        lookup_timeout_s=cache.shared_lookup_timeout_ms / 1000,
        write_bytes_per_s=cache.shared_write_rate_bytes,
        # A server like this one cannot have stored a block that does not fit the write queue.
        object_limit_bytes=cache.write_queue_bytes + OVERHEAD_BYTES,
    )


def codec_on(device: Device, codec: Codec) -> Codec:
    """Return how blocks are stored. Compression takes cores, on which a CPU model computes, so there `auto`
    is raw: RAM hits took twice as long beside compression."""
    return Codec.RAW if codec is Codec.AUTO and not device.is_gpu else codec


def check_directory(cache: CacheConfig) -> None:
    """Raise StartError if another process has the cache directory, if others may change files in it, or if
    this user cannot create or write it.

    Keeps no lock and creates no directory. A disk that fails, hangs or has become read-only is reported when
    the tier starts: then only RAM is used.
    """
    directory = str(cache.block_directory.absolute())
    files = Files()

    def look() -> None:
        _check_place(cache)
        if os.path.isdir(directory):
            files.close(take_lock(files, StorePaths(directory)))

    if cache.has_ssd:
        with contextlib.suppress(OSError):
            in_time(look)


def _check_place(cache: CacheConfig) -> None:
    """Raise StartError for a folder that cannot be created or written; warn if the disk is nearly full."""
    directory = cache.block_directory.absolute()
    existing = existing_folder(directory)
    is_read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    if existing.is_dir() and (is_read_only or os.access(existing, os.R_OK | os.W_OK | os.X_OK)):
        free_bytes, floor_bytes = shutil.disk_usage(existing).free, cache.free_space_floor_bytes
        if free_bytes < floor_bytes:
            detail = "no new blocks are written there until more is free; only RAM is used"
            sizes = {"free_bytes": free_bytes, "floor_bytes": floor_bytes}
            _log.warning("cache_disk_short", extra={**sizes, "detail": detail})
        return
    why = "this user may not write there" if existing.is_dir() else "it is not a folder"
    raise StartError(
        Reason.STORE_UNUSABLE,
        f"the SSD tier cannot be in {existing}: {why}; choose another --cache-directory, or run "
        "without it (--no-ssd)",
        metadata={"directory": str(directory)},
    )


def open_digests(cache: CacheConfig, clock: Clock) -> DigestBook | None:
    """Return the known digests of weight files; None without an SSD tier, where they are stored."""
    if not cache.has_ssd:
        return None
    return DigestBook(str(cache.block_directory.absolute()), files=Files(), clock=clock)


def fingerprint_of(path: Path, config: Config, *, dtype: str, digests: DigestBook | None) -> ModelFingerprint:
    """Return the fingerprint of the model as served. New weights are read once for it."""
    model, cache = config.model, config.cache
    quantized = f"affine {cache.kv_bits}-bit, group {cache.kv_group_size}"
    return model_fingerprint(
        path,
        dtype=dtype or "stored",
        kv_format=quantized if cache.kv_bits else "as computed",
        block_token_count=cache.block_token_count,
        adapter_dir=Path(model.adapter_path) if model.adapter_path else None,
        book=digests,
    )


def identified(
    source: ModelSource,
    config: Config,
    ssd: SsdParts | None,
    *,
    device: Device,
    clock: Clock,
    leader: LeaderParts | None,
) -> tuple[ModelSource, ModelFingerprint]:
    """Return the model with its fingerprint: that of rank 0's part if it leads a group."""
    digests = open_digests(config.cache, clock)
    fingerprint = fingerprint_of(source.path, config, dtype=source.dtype, digests=digests)
    if digests is not None:
        source = dataclasses.replace(source, code=fingerprint.code)
    if leader is None:
        return source, fingerprint
    leader.open_channel(group_facts(config, fingerprint, source, device=device, key_id=key_id_of(ssd)))
    return source, with_rank(fingerprint, leader.membership)
