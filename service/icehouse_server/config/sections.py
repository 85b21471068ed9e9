"""Settings of the server, one frozen dataclass a section. Defaults are only here, in `edge` and in `http`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icehouse_server.config import user_paths
from icehouse_server.config.edge import ConnectionConfig, SecurityConfig, ServerConfig, TenantConfig
from icehouse_server.config.http import HttpConfig
from icehouse_server.config.setting import (
    GIB,
    MIB,
    NamedPath,
    Setting,
    SettingKind,
    names_in,
    setting,
    settings_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served, and how it is loaded."""

    model: str = setting(
        "demo",
        'What to serve: "demo", "demo-gemma", a folder with an MLX model, or a hub id such as org/name.',
    )
    model_name: str | None = setting(
        None, "The model name that clients use; by default the folder's name or the hub id."
    )
    dtype: str = setting(
        "auto",
        "Type of the weights in memory; auto keeps the model's own, or uses float32 on a CPU with OpenBLAS.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    adapter_path: str | None = setting(None, "Folder with a LoRA adapter to apply to every request.")
    adapters: tuple[NamedPath, ...] = setting(
        (), "LoRA adapters that requests may choose: name=folder,name=folder, or a table in the file."
    )
    draft_model: str | None = setting(
        None, "A smaller model of the same vocabulary that guesses tokens for requests with speculation."
    )
    context_token_limit: int | None = setting(
        None,
        "Maximum tokens of prompt and output together; by default the model's own context length.",
        minimum=2,
    )
    trust_remote_code: bool = setting(False, "Let the tokenizer run Python code that comes with the model.")


@dataclasses.dataclass(frozen=True, slots=True)
class PooledModelConfig(ModelConfig):
    """One of several models of a server. [model] and [cache] have the values that it leaves out."""

    kv_bits: int = setting(0, "As cache.kv_bits, for this model.", choices=(0, 2, 3, 4, 6, 8))
    aliases: tuple[str, ...] = setting((), "Other names that requests may use in `model`.")
    tenants: tuple[str, ...] = setting(
        (), "Tenants that may use it; for others it does not exist. Default: all."
    )
    pinned: bool = setting(False, "Load it at the start, and never unload it for another model.")
    worker_port: int | None = setting(
        None,
        "Port where gateways find this model as a worker of its own, with fleet.worker_enabled; 0 lets the "
        "system choose a free one. Default: none, or the server's own port for the first model.",
        maximum=65535,
    )
    ttl_s: float = setting(
        0.0, "Unload it after this long without a call; 0 keeps it until other models need its memory."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """The inference thread: batch, queue and prefill."""

    decode_batch_limit: int = setting(
        0, "Maximum sequences that decode at once; 0 chooses by device.", maximum=4096
    )
    attention: str = setting(
        "auto",
        "How sequences attend. auto: all together, to KV in pages of one pool, if the model's KV can be "
        "paged and the device's attention over pages passes its check at the start; otherwise each to its "
        "own KV. rows: each to its own KV.",
        choices=("auto", "rows"),
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
        0, "Maximum prompt tokens of all waiting requests together; 0 is unlimited."
    )
    tenant_running_limit: int = setting(0, "Maximum running requests of one tenant; 0 is unlimited.")
    aging_s: float = setting(
        5.0, "A waiting request gains one step of priority each time this much time has passed.", minimum=0.1
    )
    mailbox_limit: int = setting(2048, "Maximum messages in the engine's mailbox.", minimum=16)
    prefill_chunk_token_count: int = setting(
        0,
        "Maximum tokens of a prefill chunk; must divide the block or be a multiple of it; 0 "
        "chooses by device.",
    )
    prefill_slice_ms: float = setting(
        0.0, "Prefill time between two decode steps of others; 0 follows the measured decode step."
    )
    prefill_chunk_ms: float = setting(
        1000.0,
        "Approximate time limit of a prefill chunk while nothing decodes (at least four times the time to "
        "read the weights); shorter chunks run where the device is as fast with them. 0 is unlimited.",
    )
    memory_limit_bytes: int = setting(
        0, "Memory limit for model, KV and cache together; 0 uses most of the device's memory."
    )
    image_feature_bytes: int = setting(
        256 * MIB,
        "Memory for vectors of encoded images, so that an image in a new context is not encoded again; "
        "the latest image's are kept whatever their size.",
    )
    preload_enabled: bool = setting(
        True, "On Linux without a GPU, load OpenBLAS in front of MLX if it is installed."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CacheConfig:
    """The prefix cache: its two tiers, and what moves between them."""

    enabled: bool = setting(True, "Keep and reuse the KV of prompts.", flag="--cache")
    ram_bytes: int = setting(0, "Size of the RAM tier; 0 uses a share of the device's memory.")
    directory: str | None = setting(
        None,
        "Folder of the SSD tier; by default icehouse/blocks in the user's cache folder.",
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
    session_checkpoint_limit: int = setting(
        8,
        "Checkpoints that a session keeps, for models whose state cannot be cut.",
        minimum=2,
    )
    spill_policy: str = setting(
        "write_behind",
        "When blocks are written to SSD: also while the disk is idle, only on eviction from RAM and at "
        "shutdown, or never.",
        choices=("write_behind", "on_evict", "off"),
    )
    min_prefix_token_count: int = setting(64, "Prefixes shorter than this are not spilled.")
    daily_write_bytes: int = setting(
        0, "Maximum bytes written to SSD per day, to limit wear; 0 is unlimited."
    )
    free_space_floor_bytes: int = setting(GIB, "Free disk space that spilling never uses.")
    codec: str = setting(
        "auto",
        "How blocks are stored on SSD: as they are in memory (raw), losslessly compressed in byte planes, or "
        "compressed once the disk has turned out to be slower than the decoder (auto; on a CPU it is raw).",
        choices=("auto", "raw", "planes"),
        flag="--cache-codec",
    )
    reader_thread_count: int = setting(2, "Threads that read blocks from SSD.", minimum=1, maximum=64)
    write_queue_bytes: int = setting(
        256 * MIB, "Maximum bytes queued for writing to SSD; blocks beyond that are dropped.", minimum=MIB
    )
    flush_timeout_s: float = setting(20.0, "Time limit for writing the RAM tier to SSD at shutdown.")
    adopt_budget_ms: float = setting(
        2.0, "Minimum time per step for restoring loaded blocks while others decode.", minimum=0.1
    )
    restore_or_recompute: bool = setting(
        True, "Prefill instead of loading from SSD if the measured rates predict that it is faster."
    )
    kv_bits: int = setting(
        0,
        "Quantize KV to this many bits (2, 3, 4, 6 or 8); 0 keeps the model's type.",
        choices=(0, 2, 3, 4, 6, 8),
    )
    kv_group_size: int = setting(
        64, "Values that share a scale in quantized KV: 32, 64 or 128.", choices=(32, 64, 128)
    )
    shared_url: str | None = setting(
        None,
        "Object store that several servers of one model share, so that each reuses what the others computed: "
        "s3://bucket/path (also for stores that speak S3), gs://, az://, or file:// and a folder that all of "
        "them mount. Credentials come from the environment (AWS_ACCESS_KEY_ID and so on). Needs the extra "
        "`shared`. Default: none.",
    )
    shared_lookup_timeout_ms: float = setting(
        1000.0,
        "Maximum time that a request waits to learn which of its blocks are in the object store.",
        minimum=1,
        maximum=2000,
    )
    shared_write_rate_bytes: int = setting(
        0, "Maximum bytes per second, on average, that are sent to the object store; 0 is unlimited."
    )

    key_file: str | None = setting(
        None,
        "File with the key that encrypts blocks on SSD, from `icehouse key new`.",
        flag="--cache-key-file",
    )
    key_command: str | None = setting(
        None,
        "Command that prints the key, such as a keychain's; run once at the start, without a shell.",
        flag="--cache-key-command",
    )

    @property
    def has_ssd(self) -> bool:
        return self.enabled and self.ssd_enabled

    @property
    def is_encrypted(self) -> bool:
        """Whether blocks are encrypted before they are written to SSD."""
        return self.key_file is not None or self.key_command is not None

    @property
    def block_directory(self) -> Path:
        """The SSD tier's folder, with the default filled in. Not created here."""
        if self.directory is None:
            return user_paths.cache_directory() / "blocks"
        return Path(self.directory)


@dataclasses.dataclass(frozen=True, slots=True)
class FleetConfig:
    """How gateways reach this server. All of it is off by default."""

    worker_enabled: bool = setting(
        False,
        "Serve vllm.grpc.engine.VllmEngine beside the API, on the same port, for gateways such as SMG; needs "
        "the extra `fleet`. With several models it serves the first one; others have their `worker_port`.",
    )
    operator_kv_tokens_enabled: bool = setting(
        False,
        "Send operators the token ids of every tenant's blocks in KV events, which are prompts in another "
        "form. Needed by a gateway that routes all tenants' prompts by their tokens, as SMG does. If off, "
        "operators get only hashes of other tenants' blocks.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class GroupConfig:
    """Machines that serve one model together, each with a part of every layer. All have the same settings."""

    hosts: str | None = setting(
        None,
        "File with the group's hosts, as mlx.launch reads it; rank 0 serves, others follow. Default: none.",
        flag="--group",
        kind=SettingKind.PATH,
    )
    rank: int | None = setting(
        None, "Which of the hosts this machine is, from 0. Default: MLX_RANK.", minimum=0
    )
    control: str | None = setting(
        None,
        "Where rank 0 listens for the others, host:port. Default: port 32322 at the first host's address.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """KV events. Over gRPC everybody who may subscribe gets them; over ZeroMQ they are off by default."""

    zmq_endpoint: str | None = setting(
        None,
        "ZeroMQ endpoint for KV events, as llm-d reads them: `tcp://127.0.0.1:5557` or `tcp://*:5557` "
        "listens, `connect:tcp://host:5557` connects to a listening subscriber. Default: none. It asks for "
        "no credentials, so whoever reaches it can read prompts' tokens.",
    )
    zmq_topic: str | None = setting(
        None,
        "Topic of the ZeroMQ messages. Default: `kv@<address>@<model>`, with the server's address and the "
        "model's name.",
    )
    zmq_tenant: str | None = setting(
        None,
        "Tenant whose blocks are published over ZeroMQ, whose messages cannot name one. "
        "Default: the default one.",
    )
    interval_ms: float = setting(50.0, "How often changes are sent to subscribers.", minimum=1)
    replay_bytes: int = setting(
        32 * MIB,
        "Memory for events kept for subscribers that fall behind or reconnect; one that "
        "falls too far behind starts over.",
        minimum=64 * 1024,
    )
    block_limit: int = setting(
        262_144,
        "Maximum blocks that are reported; each takes some 1.5 kB while there are subscribers.",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What the server reports about itself besides its log. All of it is off by default."""

    metrics_port: int | None = setting(
        None,
        "Port of the Prometheus endpoint; 0 lets the system choose a free one. Default: no endpoint.",
        maximum=65535,
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address of the Prometheus endpoint; by default only this machine can connect."
    )
    metrics_names: str | None = setting(
        None,
        "Host names, comma-separated, that the Prometheus endpoint and the status page answer to, such as "
        "gpu-1.internal, beside addresses, localhost and metrics_host. Requests for other names get 421, "
        "so that no web page can read them under a name of its own. `*` allows any.",
    )
    status_page_enabled: bool = setting(
        False,
        "Show a status page at / of the Prometheus endpoint: tiers, hit rate, times to first token, shared "
        "prefixes without their text, slow requests.",
    )
    status_page_text_enabled: bool = setting(
        False,
        "Show on the status page how the text of each shared prefix begins. That shows parts of prompts and "
        "outputs of every tenant to whoever reaches the port, which asks for no credentials. Refused "
        "beyond loopback without allow_insecure_public.",
    )
    traces_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that receives spans over OTLP/gRPC, such as "
        "http://localhost:4317. Default: none.",
    )
    traces_sample_ratio: float = setting(
        1.0, "Share of the traces started here that are kept; a client's own decision is followed.", maximum=1
    )
    load_report_enabled: bool = setting(
        False, "Send the server's load to balancers, in an ORCA trailer of every call."
    )
    sample_interval_s: float = setting(
        1.0, "How often the engine is sampled for metrics and load reports.", minimum=0.1
    )

    @property
    def own_names(self) -> tuple[str, ...]:
        return names_in(self.metrics_names)


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """The server's log, on standard error."""

    format: str = setting(
        "text", "Format of log lines: text for people, json for machines.", choices=("text", "json")
    )
    level: str = setting(
        "info", "The lowest level that is logged.", choices=("debug", "info", "warning", "error")
    )
    access_enabled: bool = setting(True, "Log one line for every call, when it ends.", flag="--access-log")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All sections of the settings."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    connection: ConnectionConfig = dataclasses.field(default_factory=ConnectionConfig)
    http: HttpConfig = dataclasses.field(default_factory=HttpConfig)
    security: SecurityConfig = dataclasses.field(default_factory=SecurityConfig)
    tenant: TenantConfig = dataclasses.field(default_factory=TenantConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    group: GroupConfig = dataclasses.field(default_factory=GroupConfig)
    kv_events: KvEventsConfig = dataclasses.field(default_factory=KvEventsConfig)
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    models: tuple[PooledModelConfig, ...] = ()
    """The models of a server with several, or with one that may be unloaded; the first is the default. If
    empty, only `model` is served."""

    @property
    def worker_ports(self) -> tuple[int, ...]:
        """Ports of models that gateways find as workers of their own."""
        return tuple(model.worker_port for model in self.models if model.worker_port is not None)

    def of_model(self, model: PooledModelConfig) -> Config:
        """Return the configuration of one of `models`."""
        return dataclasses.replace(
            self, model=model, cache=dataclasses.replace(self.cache, kv_bits=model.kv_bits), models=()
        )


MODELS = "models"
"""The file's key of the tables with one model each."""

SECTIONS: Mapping[str, type[Any]] = {
    name: owner for name, owner in typing.get_type_hints(Config).items() if name != MODELS
}

SETTINGS: tuple[Setting, ...] = tuple(s for name, owner in SECTIONS.items() for s in settings_of(name, owner))
"""All declarations, in the order of `icehouse config` and of docs/settings.md."""

MODEL_SETTINGS = settings_of(MODELS, PooledModelConfig)
"""The settings that a [[models]] table may have."""
