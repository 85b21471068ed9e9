"""Settings of the server, one frozen dataclass per room that reads it. Defaults live here, once."""

from __future__ import annotations

import dataclasses
from typing import Any

from icehouse_server.config.cache import CacheConfig
from icehouse_server.config.connection import ConnectionConfig
from icehouse_server.config.fleet import FleetConfig, KvEventsConfig
from icehouse_server.config.model import ModelConfig
from icehouse_server.config.security import SecurityConfig
from icehouse_server.config.setting import MIB, Kind, Setting, setting, settings_of
from icehouse_server.config.telemetry import TelemetryConfig
from icehouse_server.config.tenants import TenantConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC edge: where it listens and what it accepts."""

    host: str = setting("127.0.0.1", "Address to listen on; by default only this machine can connect.")
    port: int = setting(50051, "TCP port; 0 lets the system choose a free one.", minimum=0, maximum=65535)
    uds: str | None = setting(
        None,
        "Unix socket to listen on instead of TCP; the file is created and removed by the server.",
        kind=Kind.PATH,
    )
    max_message_bytes: int = setting(
        16 * MIB, "Maximum size of a request message.", minimum=1024, maximum=1024 * MIB
    )
    request_memory_bytes: int = setting(
        512 * MIB,
        "Memory for all requests being read or served; further ones wait. One tenant, or one "
        "connection without credentials, gets at most half.",
        minimum=64 * 1024,
    )
    answer_memory_bytes: int = setting(
        512 * MIB,
        "Memory for all answers until clients read them; a call whose answer does not fit ends with "
        "RESOURCE_EXHAUSTED. One tenant, or one connection without credentials, gets at most half.",
        minimum=MIB,
    )
    max_concurrent_calls: int = setting(
        1024,
        "Maximum concurrent calls; more are refused with RESOURCE_EXHAUSTED. One tenant, or one connection "
        "without credentials, gets at most three quarters; the share shrinks under load.",
        minimum=1,
    )
    outbox_event_limit: int = setting(
        256, "Unread events of a slow client before they are merged.", minimum=4
    )
    outbox_byte_limit: int = setting(
        MIB, "Unread bytes of a slow client before its call is ended.", minimum=4096
    )
    stall_timeout_s: float = setting(
        30.0, "How long a client with a full outbox may read nothing before its call is ended.", minimum=0.1
    )
    stuck_timeout_s: float = setting(
        1.5,
        "Health turns NOT_SERVING while a step takes longer than this and than a few usual steps.",
        minimum=0.1,
    )
    drain_grace_s: float = setting(
        30.0, "How long running calls may continue after the server was told to stop.", minimum=0
    )
    session_metadata: str = setting(
        "session-id,x-session-id,x-claude-code-session-id",
        "Metadata keys, comma-separated; if a request names no session, the first of them that the call "
        "has is used. `none` switches this off.",
    )
    reflection_enabled: bool = setting(True, "Offer gRPC server reflection, for grpcurl and similar tools.")
    channelz_enabled: bool = setting(
        False, "Offer channelz, which shows operators this server's connections and calls."
    )
    default_max_output_tokens: int = setting(
        256, "Maximum output tokens of a request that sets none.", minimum=1
    )
    max_output_tokens_limit: int = setting(
        32768, "Maximum tokens of one output; requests for more are clamped.", minimum=1
    )
    max_completions: int = setting(16, "Maximum completions of one request.", minimum=1, maximum=256)
    max_stop_count: int = setting(16, "Maximum stop strings in one request.", minimum=0)
    max_stop_bytes: int = setting(256, "Maximum length of a stop string, in UTF-8 bytes.", minimum=1)
    tokenizer_thread_count: int = setting(2, "Threads that tokenize prompts.", minimum=1, maximum=64)
    max_grammar_bytes: int = setting(
        64 * 1024,
        "Maximum size of a response format: JSON schema, regular expression, grammar or choices.",
        minimum=1024,
        maximum=256 * 1024,
    )
    max_images: int = setting(16, "Maximum images in one request.", minimum=0, maximum=256)
    max_image_bytes: int = setting(
        16 * MIB, "Maximum size of an encoded image.", minimum=1024, maximum=1024 * MIB
    )
    max_image_pixels: int = setting(
        16_777_216,
        "Maximum pixels of an image; a larger one is scaled down first. Refused before decoding: a JPEG "
        "of more than 16 times as many pixels (progressive: 4 times), any other image of more than 4 times.",
        minimum=1,
        maximum=89_000_000,
    )
    image_memory_bytes: int = setting(
        1024 * MIB,
        "Memory for the images of all requests: 8 bytes a pixel (WebP: 20) while one is decoded and 4 for "
        "each that is kept, then the model's input made of them, as long as the request waits or runs; "
        "more are refused with RESOURCE_EXHAUSTED. One tenant, or one connection without credentials, gets "
        "at most half.",
        minimum=MIB,
    )
    image_folders: str | None = setting(
        None,
        "Folders, comma-separated, whose images requests may name by file: URLs; links in them are not "
        "followed. Default: none.",
    )
    image_hosts: str | None = setting(
        None,
        "Hosts, comma-separated, such as images.example.org,10.0.0.7:8080, whose images requests may name "
        "by https: and http: URLs. Default: none.",
    )
    image_fetch_timeout_s: float = setting(
        10.0, "Time limit for fetching the images that a request names.", minimum=0.1
    )
    max_embedding_inputs: int = setting(64, "Maximum inputs of one Embed request.", minimum=1)
    max_rerank_documents: int = setting(128, "Maximum documents of one Rerank request.", minimum=1)
    grammar_timeout_s: float = setting(10.0, "Time limit for compiling a response format.", minimum=0.1)
    grammar_cache_count: int = setting(
        32, "How many compiled response formats are kept for later requests.", minimum=1
    )

    @property
    def session_keys(self) -> tuple[str, ...]:
        """`session_metadata` as gRPC has metadata's keys: in lower case."""
        names = (name.strip().lower() for name in self.session_metadata.split(","))
        return tuple(name for name in names if name and name != "none")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """The inference thread: batch, queue and prefill."""

    decode_batch_limit: int = setting(
        0, "Maximum sequences that decode at once; 0 chooses by device.", minimum=0, maximum=4096
    )
    lane_row_limit: int = setting(
        0,
        "Does nothing any more: all sequences share one forward pass. Still read, for older configurations.",
        minimum=0,
        maximum=4096,
    )
    attention: str = setting(
        "auto",
        "How sequences attend: all together to KV in pages of one pool (pages), each on its own KV (rows), "
        "or those of like length on one buffer, which takes up to half as much memory again (slab). auto "
        "takes pages on a GPU whose kernels prove right at the start; else it measures rows and slab and "
        "keeps the faster.",
        choices=("auto", "pages", "rows", "slab"),
    )
    wired_memory: bool = setting(
        False,
        "On Metal, wire the model's memory. That avoids page faults of a model that nearly fills memory, "
        "but macOS kernel panics under MLX were traced to it (mlx issue 3186).",
    )
    prefilling_limit: int = setting(
        8, "Maximum prompts that are prefilled in turns; later ones wait.", minimum=1, maximum=4096
    )
    waiting_limit: int = setting(
        1024, "Maximum requests waiting for a slot; more are refused with RESOURCE_EXHAUSTED.", minimum=1
    )
    waiting_token_limit: int = setting(
        0, "Maximum prompt tokens of all waiting requests together; 0 is unlimited.", minimum=0
    )
    tenant_running_limit: int = setting(
        0, "Maximum running requests of one tenant; 0 is unlimited.", minimum=0
    )
    aging_s: float = setting(
        5.0, "A waiting request gains one step of priority each time this much time has passed.", minimum=0.1
    )
    mailbox_limit: int = setting(2048, "Maximum messages in the engine's mailbox.", minimum=16)
    prefill_chunk_token_count: int = setting(
        0,
        "Maximum tokens of a prefill chunk; must divide the block or be a multiple of it; 0 "
        "chooses by device.",
        minimum=0,
    )
    prefill_slice_ms: float = setting(
        0.0, "Prefill time between two decode steps of others; 0 follows the measured decode step.", minimum=0
    )
    prefill_chunk_ms: float = setting(
        1000.0,
        "Approximate time limit of a prefill chunk while nothing decodes (at least four times the time to "
        "read the weights); shorter chunks run where the device is as fast with them. 0 is unlimited.",
        minimum=0,
    )
    memory_limit_bytes: int = setting(
        0, "Memory limit for model, KV and cache together; 0 uses most of the device's memory.", minimum=0
    )
    image_feature_bytes: int = setting(
        256 * MIB,
        "Memory for vectors of encoded images, so that an image in a new context is not encoded again; "
        "the latest image's are kept whatever their size.",
        minimum=0,
    )
    preload_enabled: bool = setting(
        True, "On Linux without a GPU, load OpenBLAS in front of MLX if it is installed."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """What the server says, on standard error."""

    format: str = setting(
        "text",
        "Format of log lines: text for people, json for machines.",
        choices=("text", "json"),
        flag="--log-format",
    )
    level: str = setting(
        "info",
        "The lowest level that is logged.",
        choices=("debug", "info", "warning", "error"),
        flag="--log-level",
    )
    access_enabled: bool = setting(True, "Log one line for every call, when it ends.", flag="--access-log")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All of it. Sections are named after the rooms that read them."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    connection: ConnectionConfig = dataclasses.field(default_factory=ConnectionConfig)
    security: SecurityConfig = dataclasses.field(default_factory=SecurityConfig)
    tenant: TenantConfig = dataclasses.field(default_factory=TenantConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    kv_events: KvEventsConfig = dataclasses.field(default_factory=KvEventsConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)


SECTIONS: dict[str, type[Any]] = {
    "server": ServerConfig,
    "connection": ConnectionConfig,
    "security": SecurityConfig,
    "tenant": TenantConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "cache": CacheConfig,
    "fleet": FleetConfig,
    "kv_events": KvEventsConfig,
    "telemetry": TelemetryConfig,
    "log": LogConfig,
}

SETTINGS: tuple[Setting, ...] = tuple(s for name, owner in SECTIONS.items() for s in settings_of(name, owner))
"""Every declaration, in the order of `icehouse config` and of docs/settings.md."""
