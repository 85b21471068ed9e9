"""Settings of the prefix cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from icehouse_server.config import paths
from icehouse_server.config.setting import GIB, MIB, Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """The prefix cache: its two tiers, and what moves between them."""

    enabled: bool = setting(True, "Keep and reuse the KV of prompts.", flag="--cache")
    ram_bytes: int = setting(0, "Size of the RAM tier; 0 uses a share of the device's memory.", minimum=0)
    directory: str | None = setting(
        None,
        "Folder of the SSD tier; by default icehouse/blocks in the user's cache folder.",
        kind=Kind.PATH,
        flag="--cache-directory",
    )
    ssd_enabled: bool = setting(True, "Keep blocks on SSD too, so that they survive a restart.")
    ssd_bytes: int = setting(
        32 * GIB, "Maximum size of the SSD tier; every file in its folder counts.", minimum=MIB
    )
    block_token_count: int = setting(256, "Tokens of one block.", minimum=1, maximum=65536)
    checkpoint_interval_tokens: int = setting(
        2048,
        "Tokens between checkpoints, for models whose state cannot be cut; a multiple of the block.",
        minimum=1,
    )
    spill_policy: str = setting(
        "on_evict",
        "When blocks are written to SSD: on eviction from RAM, also when used a second time, or never.",
        choices=("on_evict", "write_behind", "off"),
    )
    min_prefix_token_count: int = setting(64, "Prefixes shorter than this are not spilled.", minimum=0)
    daily_write_bytes: int = setting(
        0, "Maximum bytes written to SSD per day, to limit wear; 0 is unlimited.", minimum=0
    )
    free_space_floor_bytes: int = setting(GIB, "Free disk space that spilling never uses.", minimum=0)
    reader_thread_count: int = setting(2, "Threads that read blocks from SSD.", minimum=1, maximum=64)
    write_queue_bytes: int = setting(
        256 * MIB, "Maximum bytes queued for writing to SSD; blocks beyond that are dropped.", minimum=MIB
    )
    flush_timeout_s: float = setting(
        20.0, "Time limit for writing the RAM tier to SSD at shutdown.", minimum=0
    )
    adopt_budget_ms: float = setting(
        2.0, "Minimum time of a step for taking loaded blocks into use while others decode.", minimum=0.1
    )
    restore_or_recompute: bool = setting(
        True, "Prefill instead of loading from SSD where that is faster by the measured rates."
    )
    kv_bits: int = setting(
        0, "Quantize KV to this many bits (2, 3, 4, 6 or 8); 0 keeps the model's type.", minimum=0, maximum=8
    )
    kv_group_size: int = setting(
        64, "Values that share a scale in quantized KV: 32, 64 or 128.", minimum=32, maximum=128
    )

    key_file: str | None = setting(
        None,
        "File with the key that encrypts blocks on SSD, from `icehouse key new`.",
        kind=Kind.PATH,
        flag="--cache-key-file",
    )
    key_command: str | None = setting(
        None,
        "Command that prints the key, such as a keychain's; run once at the start, without a shell.",
        flag="--cache-key-command",
    )

    @property
    def is_encrypted(self) -> bool:
        """Whether blocks are encrypted on their way to the SSD."""
        return self.key_file is not None or self.key_command is not None

    @property
    def block_directory(self) -> Path:
        """The SSD tier's folder, with the default filled in. Not created here."""
        if self.directory is None:
            return paths.cache_directory() / "blocks"
        return Path(self.directory).expanduser()
