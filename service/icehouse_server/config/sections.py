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

    host: str = setting("127.0.0.1", Kind.TEXT, "Address to listen on; loopback unless you mean otherwise.")
    port: int = setting(
        50051, Kind.COUNT, "TCP port; 0 lets the system choose a free one.", minimum=0, maximum=65535
    )
    uds: str | None = setting(
        None,
        Kind.PATH,
        "Unix socket to listen on instead of TCP; the file is created and removed by the server.",
    )
    max_message_bytes: int = setting(
        16 * MIB, Kind.BYTES, "Largest request message.", minimum=1024, maximum=1024 * MIB
    )
    request_memory_bytes: int = setting(
        512 * MIB,
        Kind.BYTES,
        "Memory of all requests that are read or served; more wait for their turn, and one tenant, or "
        "connection without credentials, gets at most half.",
        minimum=64 * 1024,
    )
    answer_memory_bytes: int = setting(
        512 * MIB,
        Kind.BYTES,
        "Memory of all answers until they are read; a call whose answer finds no room ends with "
        "RESOURCE_EXHAUSTED. One tenant, or connection without credentials, gets at most half.",
        minimum=MIB,
    )
    max_concurrent_calls: int = setting(
        1024,
        Kind.COUNT,
        "Calls served at once; more are refused with RESOURCE_EXHAUSTED. One tenant, or connection without "
        "credentials, gets at most three quarters, and less the less is free.",
        minimum=1,
    )
    outbox_event_limit: int = setting(
        256, Kind.COUNT, "Events one slow reader may leave unread before they are merged.", minimum=4
    )
    outbox_byte_limit: int = setting(
        MIB, Kind.BYTES, "Bytes one slow reader may leave unread before the call is ended.", minimum=4096
    )
    stall_timeout_s: float = setting(
        30.0,
        Kind.SECONDS,
        "How long a reader with a full outbox may take nothing before the call is ended.",
        minimum=0.1,
    )
    stuck_timeout_s: float = setting(
        1.5,
        Kind.SECONDS,
        "A step longer than this, and than a few usual ones, turns health NOT_SERVING until it ends.",
        minimum=0.1,
    )
    drain_grace_s: float = setting(
        30.0, Kind.SECONDS, "How long running calls may go on after the order to stop.", minimum=0
    )
    session_metadata: str = setting(
        "session-id,x-session-id,x-claude-code-session-id",
        Kind.TEXT,
        "Metadata keys by commas; the first that a call has is its session where the request names none. "
        "`none` looks at none.",
    )
    reflection_enabled: bool = setting(
        True, Kind.SWITCH, "Offer gRPC server reflection, for grpcurl and the like."
    )
    channelz_enabled: bool = setting(
        False, Kind.SWITCH, "Offer channelz: the connections and calls of this server, for operators."
    )
    default_max_output_tokens: int = setting(
        256, Kind.COUNT, "Tokens generated when a request does not say.", minimum=1
    )
    max_output_tokens_limit: int = setting(
        32768, Kind.COUNT, "Most tokens of one output; a request for more gets so many.", minimum=1
    )
    max_completions: int = setting(
        16, Kind.COUNT, "Most outputs that a request may ask for of its one prompt.", minimum=1, maximum=256
    )
    max_stop_count: int = setting(16, Kind.COUNT, "Most stop strings in one request.", minimum=0)
    max_stop_bytes: int = setting(256, Kind.BYTES, "Longest stop string, in UTF-8 bytes.", minimum=1)
    tokenizer_thread_count: int = setting(
        2, Kind.COUNT, "Threads that tokenize prompts beside the event loop.", minimum=1, maximum=64
    )
    max_grammar_bytes: int = setting(
        64 * 1024,
        Kind.BYTES,
        "Longest response format: a JSON schema, a regular expression, a grammar, choices.",
        minimum=1024,
        maximum=256 * 1024,
    )
    max_images: int = setting(16, Kind.COUNT, "Most images of one request.", minimum=0, maximum=256)
    max_image_bytes: int = setting(
        16 * MIB, Kind.BYTES, "Largest image, encoded.", minimum=1024, maximum=1024 * MIB
    )
    max_image_pixels: int = setting(
        16_777_216,
        Kind.COUNT,
        "Most pixels that are kept of an image; a larger one is scaled down to them first. Refused before "
        "it is decoded: a JPEG of more than 16 times as many (progressive: 4), another image of more than 4 "
        "times.",
        minimum=1,
        maximum=89_000_000,
    )
    image_memory_bytes: int = setting(
        1024 * MIB,
        Kind.BYTES,
        "Memory of the images of all requests: 8 bytes a pixel (WebP: 20) while one is decoded and 4 for "
        "each that is kept, then what is made of them for the model, as long as the request waits or runs; "
        "more are refused with RESOURCE_EXHAUSTED. One tenant, or connection without credentials, gets at "
        "most half.",
        minimum=MIB,
    )
    image_folders: str | None = setting(
        None,
        Kind.TEXT,
        "Folders by commas; requests may name images in them by file: URLs; links there are not followed; "
        "absent: none.",
    )
    image_hosts: str | None = setting(
        None,
        Kind.TEXT,
        "Hosts by commas, such as images.example.org,10.0.0.7:8080; requests may name images there by https: "
        "and http: URLs; absent: none.",
    )
    image_fetch_timeout_s: float = setting(
        10.0, Kind.SECONDS, "How long reading the images that a request names may take.", minimum=0.1
    )
    max_embedding_inputs: int = setting(64, Kind.COUNT, "Most inputs of one Embed request.", minimum=1)
    max_rerank_documents: int = setting(128, Kind.COUNT, "Most documents of one Rerank request.", minimum=1)
    grammar_timeout_s: float = setting(
        10.0, Kind.SECONDS, "How long compiling a response format may take.", minimum=0.1
    )
    grammar_cache_count: int = setting(
        32, Kind.COUNT, "Compiled response formats that are kept for the next request.", minimum=1
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
        0, Kind.COUNT, "Sequences decoding at once; 0 chooses by device.", minimum=0, maximum=4096
    )
    lane_row_limit: int = setting(
        0,
        Kind.COUNT,
        "Does nothing any more: all sequences share one forward pass. Still read, for older configurations.",
        minimum=0,
        maximum=4096,
    )
    attention: str = setting(
        "auto",
        Kind.CHOICE,
        "How sequences attend. auto: all together to KV in pages of one pool, where the model's KV can lie "
        "there and the device's attention over pages proves right at the start; else each to its own KV. "
        "rows: each to its own KV.",
        choices=("auto", "rows"),
    )
    wired_memory: bool = setting(
        False,
        Kind.SWITCH,
        "On Metal, wire what the model uses into memory, which spares a model that nearly fills it page "
        "faults, and is what macOS kernel panics under MLX were traced to (mlx issue 3186).",
    )
    prefilling_limit: int = setting(
        8, Kind.COUNT, "Prompts being prefilled in turns; later ones wait.", minimum=1, maximum=4096
    )
    waiting_limit: int = setting(
        1024,
        Kind.COUNT,
        "Requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED.",
        minimum=1,
    )
    waiting_token_limit: int = setting(
        0, Kind.COUNT, "Prompt tokens that may wait for a slot together; 0 is unlimited.", minimum=0
    )
    tenant_running_limit: int = setting(
        0, Kind.COUNT, "Requests of one tenant that run at once; 0 is unlimited.", minimum=0
    )
    aging_s: float = setting(
        5.0,
        Kind.SECONDS,
        "A waiting request gains one step of priority each time it has waited this long.",
        minimum=0.1,
    )
    mailbox_limit: int = setting(2048, Kind.COUNT, "Messages in the engine's mailbox.", minimum=16)
    prefill_chunk_token_count: int = setting(
        0,
        Kind.COUNT,
        "Most tokens prefilled in one go; divides the block or is a multiple of it; 0 chooses by device.",
        minimum=0,
    )
    prefill_slice_ms: float = setting(
        0.0,
        Kind.MILLISECONDS,
        "Prefill time between two decode steps while others decode; 0 follows the measured decode step.",
        minimum=0,
    )
    prefill_chunk_ms: float = setting(
        1000.0,
        Kind.MILLISECONDS,
        "About the longest prefill chunk while nothing decodes (four times the reading of the weights if "
        "that is more); shorter ones run where the device is as fast with them. 0 is unlimited.",
        minimum=0,
    )
    memory_limit_bytes: int = setting(
        0,
        Kind.BYTES,
        "Memory that model, KV and cache may take together; 0 takes most of the device's.",
        minimum=0,
    )
    image_feature_bytes: int = setting(
        256 * MIB,
        Kind.BYTES,
        "Vectors kept of images that were encoded, so that one that comes again in another context is not "
        "encoded again; the latest one's are kept whatever their size.",
        minimum=0,
    )
    preload_enabled: bool = setting(
        True,
        Kind.SWITCH,
        "On Linux without a GPU, load OpenBLAS in front of MLX where it is installed.",
        flag="--preload",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """What the server says, on standard error."""

    format: str = setting(
        "text",
        Kind.CHOICE,
        "One line per event, for people or for machines.",
        choices=("text", "json"),
        flag="--log-format",
    )
    level: str = setting(
        "info",
        Kind.CHOICE,
        "The least important event shown.",
        choices=("debug", "info", "warning", "error"),
        flag="--log-level",
    )
    access_enabled: bool = setting(
        True, Kind.SWITCH, "One line for every call, when it ends.", flag="--access-log"
    )


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
