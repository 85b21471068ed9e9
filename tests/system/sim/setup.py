"""Setup of one scenario's server: a model's kinds of cache, budgets and policies, all from the seed."""

from __future__ import annotations

import dataclasses
import random

from icehouse_server.domain.ids import AdapterDigest, AdapterName, Fingerprint
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings, QuotaLimits
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.storage.local.directory.manifest import LOG_ALLOWANCE_BYTES
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.storage_settings import Codec, StorageSettings

from tests.fixtures.storage.object_store import MemoryStore
from tests.system.sim.model import ModelSpec

BLOCK = 4
ADAPTER_DIGESTS = {
    AdapterName("formal"): AdapterDigest(b"1" * 32),
    AdapterName("terse"): AdapterDigest(b"2" * 32),
}
CREDIT_BYTES = 66_000
"""Bytes that one small block takes of the write queue."""
_MANIFEST_BYTES = 60_000
_FILE_BYTES = 1_100


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The settings of every life of one server; `specs` are two models with one tokenizer."""

    specs: tuple[ModelSpec, ModelSpec]
    has_storage: bool
    ram_limit_bytes: int
    checkpoint_interval_tokens: int
    spill_policy: str
    min_prefix_token_count: int
    may_recompute: bool
    limits: SchedulerLimits
    waiting: WaitingLimits
    memory_limit_bytes: int
    """0: no memory guard."""
    disk_limit_bytes: int
    daily_limit_bytes: int
    spill_queue_bytes: int
    load_queue_count: int
    task_queue_count: int
    quotas: QuotaLimits
    session_checkpoint_limit: int = 0
    session_limit: int = 4096
    """Sessions that the server remembers."""
    has_shared_prefixes: bool = False
    """Whether requests may start from another tenant's prompts."""
    cipher: Cipher | None = None
    """Encrypts the SSD tier; must make no difference to restores."""
    codec: Codec = Codec.RAW
    store: MemoryStore | None = None
    """The object store behind the SSD tier; it outlives every life."""

    def prefix_settings(self, model: int) -> PrefixSettings:
        """Return the prefix cache's settings for one of the models."""
        return PrefixSettings(
            fingerprint=fingerprint(model),
            block_token_count=BLOCK,
            is_enabled=True,
            ram_limit_bytes=self.ram_limit_bytes,
            checkpoint_interval_tokens=self.checkpoint_interval_tokens,
            session_checkpoint_limit=self.session_checkpoint_limit,
            spill_policy=self.spill_policy,
            min_prefix_token_count=self.min_prefix_token_count,
            may_recompute=self.may_recompute,
            quotas=self.quotas,
            adapters=ADAPTER_DIGESTS,
            name_secret=self.cipher.name_secret if self.cipher else b"",
        )

    def storage_settings(self, directory: str) -> StorageSettings:
        """Return the SSD tier's settings."""
        return StorageSettings(
            directory=directory,
            limit_bytes=self.disk_limit_bytes,
            free_floor_bytes=0,
            daily_write_limit_bytes=self.daily_limit_bytes,
            spill_queue_limit_bytes=self.spill_queue_bytes,
            load_queue_limit_count=self.load_queue_count,
            task_queue_limit_count=self.task_queue_count,
            reader_thread_count=1,
            codec=self.codec,
        )


def fingerprint(model: int) -> Fingerprint:
    """Return the fingerprint of model 0 or 1."""
    return Fingerprint(bytes([model + 1]) * 32)


def make_setup(dice: random.Random) -> Setup:
    """Draw a server's setup; budgets are mostly small, so that every limit is reached."""
    has_kv, windows, has_state = dice.choice(
        (
            (True, (0,), False),
            (True, (2, 3), False),
            (True, (4, 6, 11), False),
            (True, (0, 3, 6), True),
            (False, (0,), True),
            (False, (5, 9), False),
        )
    )
    window = dice.choice(windows)
    waiting = WaitingLimits(
        request_limit=dice.choice((2, 30, 30, 30)),
        token_limit=dice.choice((0, 0, 200)),
        tenant_running_limit=dice.choice((0, 0, 2)),
        aging_s=dice.choice((0.05, 5.0)),
    )
    limits = SchedulerLimits(
        running_limit=dice.choice((1, 3, 6)),
        prefilling_limit=dice.choice((1, 2, 3)),
        prefill_chunk_token_count=BLOCK * dice.choice((1, 2, 3)),
        prefill_slice_s=dice.choice((0.0, 0.0005)),
    )
    return Setup(
        specs=(ModelSpec(1, has_kv, window, has_state), ModelSpec(2, has_kv, window, has_state)),
        has_storage=dice.random() < 0.95,
        ram_limit_bytes=dice.choice((0, 150, 400, 400, 1_000, 1_000, 3_000, 100_000)),
        checkpoint_interval_tokens=BLOCK * dice.choice((1, 2, 4)),
        spill_policy=dice.choice(("on_evict",) * 4 + ("write_behind",) * 4 + ("off",)),
        min_prefix_token_count=dice.choice((0, 0, 2 * BLOCK)),
        may_recompute=dice.random() < 0.3,
        waiting=waiting,
        memory_limit_bytes=dice.choice((0, 0, 4_000, 8_000)),
        disk_limit_bytes=LOG_ALLOWANCE_BYTES
        + _MANIFEST_BYTES
        + _FILE_BYTES * dice.choice((0, 5, 12, 30, 500)),
        daily_limit_bytes=dice.choice((0,) * 7 + (15 * _FILE_BYTES,)),
        spill_queue_bytes=CREDIT_BYTES * dice.choice((1, 3, 60)),
        load_queue_count=dice.choice((1, 16)),
        task_queue_count=dice.choice((1, 64, 64)),
        quotas=QuotaLimits(),
        limits=dataclasses.replace(
            limits,
            prefill_grid_token_count=dice.choice((1, 2, BLOCK)),
            # Servers with the most slots have passes with chunks of several prompts.
            pass_token_count=limits.prefill_chunk_token_count * (3 if limits.running_limit == 6 else 1),
            prefill_chunk_s=dice.choice((0.0, 0.0001)),
        ),
    )


def draw_quotas(setup: Setup, dice: random.Random) -> QuotaLimits:
    """Draw each tenant's quotas; most servers have none."""
    ram_bytes = dice.choice((0, 0, 0, setup.ram_limit_bytes // 2, setup.ram_limit_bytes // 5))
    blocks = dice.choice((0, 0, 0, 3, 10))
    # A block on its way to SSD counts with more bytes than it takes there in the end.
    return QuotaLimits(ram_bytes, CREDIT_BYTES + blocks * _FILE_BYTES if blocks else 0)
