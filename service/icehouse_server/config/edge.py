"""Edge settings: where the server listens, who may connect and call, and how much each may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from icehouse_server.config.setting import KIB, MIB, SettingKind, names_in, setting


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC edge: where it listens and what it accepts."""

    host: str = setting("127.0.0.1", "Address to listen on; by default only this machine can connect.")
    port: int = setting(50051, "TCP port; 0 lets the system choose a free one.", maximum=65535)
    uds: str | None = setting(
        None,
        "Unix socket to listen on instead of TCP; the file is created and removed by the server.",
        kind=SettingKind.PATH,
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
        30.0, "How long running calls may continue after the server was told to stop."
    )
    session_metadata: str = setting(
        "session-id,x-session-id,x-claude-code-session-id,x-session-affinity,x-opencode-session",
        "Metadata keys, comma-separated; if a request names no session, the first of these that the call "
        "has is used. `none` switches this off.",
    )
    agent_metadata: str = setting(
        "agent-id,x-claude-code-agent-id,thread-id",
        "Metadata keys, comma-separated; the first of these that the call has names the agent that calls "
        "within a session. `none` switches this off.",
    )
    parent_metadata: str = setting(
        "parent-session-id,x-parent-session-id",
        "Metadata keys, comma-separated; if a request names no parent of its session, the first of these "
        "that the call has is used. `none` switches this off.",
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
    max_stop_count: int = setting(16, "Maximum stop strings in one request.")
    max_stop_bytes: int = setting(256, "Maximum length of a stop string, in UTF-8 bytes.", minimum=1)
    tokenizer_thread_count: int = setting(2, "Threads that tokenize prompts.", minimum=1, maximum=64)
    reply_memory_bytes: int = setting(
        64 * MIB,
        "Memory for the tokens of earlier replies, which stay in stable prompts as they were generated; 4 "
        "bytes a token. When it is full, the tenant with the most loses those it used least recently; 0 "
        "keeps none.",
    )
    prefetch_token_limit: int = setting(
        16_384,
        "Tokens computed ahead for a session's next turn while nothing else runs, where the chat template "
        "rewrites the history; 0 computes none.",
    )
    max_grammar_bytes: int = setting(
        64 * 1024,
        "Maximum size of a response format: JSON schema, regular expression, grammar or choices.",
        minimum=1024,
        maximum=256 * 1024,
    )
    max_images: int = setting(16, "Maximum images in one request.", maximum=256)
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
    def local_address(self) -> str:
        """Where a client on this machine finds the server: "host:port" or "unix:path"."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def session_keys(self) -> tuple[str, ...]:
        """The keys of `session_metadata` in lower case, as gRPC has metadata keys."""
        return _keys_in(self.session_metadata)

    @property
    def agent_keys(self) -> tuple[str, ...]:
        """The keys of `agent_metadata` in lower case, as gRPC has metadata keys."""
        return _keys_in(self.agent_metadata)

    @property
    def parent_keys(self) -> tuple[str, ...]:
        """The keys of `parent_metadata` in lower case, as gRPC has metadata keys."""
        return _keys_in(self.parent_metadata)


def _keys_in(text: str) -> tuple[str, ...]:
    return tuple(name for name in names_in(text.lower()) if name != "none")


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Limits of one connection, for any client."""

    connection_limit: int = setting(1024, "Maximum open connections; further ones are closed.", minimum=1)
    stream_limit: int = setting(
        256, "Maximum concurrent calls on one connection; the client holds further ones back.", minimum=1
    )
    max_metadata_bytes: int = setting(
        16 * KIB, "Maximum metadata of one call.", minimum=1024, maximum=1024 * KIB
    )
    handshake_timeout_s: float = setting(20.0, "Time limit for the TLS and HTTP/2 handshake.", minimum=0.1)
    message_timeout_s: float = setting(
        60.0, "Time limit for a call's request message to arrive.", minimum=0.1
    )
    min_ping_interval_s: float = setting(
        8.0, "Minimum interval between a client's pings; faster clients are disconnected.", minimum=0.01
    )
    keepalive_s: float = setting(
        60.0, "The server pings a connection after this much silence, to notice a lost client.", minimum=1
    )
    keepalive_timeout_s: float = setting(
        20.0, "How long the server waits for the answer to its ping.", minimum=0.1
    )
    idle_s: float = setting(
        600.0, "A connection without calls is closed after this time; 0 keeps it.", flag="--connection-idle-s"
    )
    max_age_s: float = setting(
        0.0,
        "A connection accepts no new calls after this time, so that balancers can move it; 0 is unlimited.",
        flag="--connection-max-age-s",
    )
    max_age_grace_s: float = setting(
        600.0,
        "How long running calls may continue on a connection that reached its maximum age.",
        flag="--connection-max-age-grace-s",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Certificates and tokens. Without any, everybody who reaches the address may do everything."""

    tls_certificate: str | None = setting(
        None, "PEM file with the server's certificate chain; switches TLS on.", kind=SettingKind.PATH
    )
    tls_key: str | None = setting(None, "PEM file with the certificate's private key.", kind=SettingKind.PATH)
    tls_client_ca: str | None = setting(
        None,
        "PEM file with the authorities of client certificates; every client then needs one.",
        kind=SettingKind.PATH,
    )
    token_file: str | None = setting(
        None, "File of hashed bearer tokens, from `icehouse token new`; every call then needs one."
    )
    operators: str | None = setting(
        None, "Names in client certificates, comma-separated, that may act for all tenants."
    )
    reload_s: float = setting(
        5.0,
        "How often certificate and token files are checked for changes.",
        minimum=0.1,
        flag="--security-reload-s",
    )
    health_open: bool = setting(
        True, "Answer health checks of callers without credentials.", flag="--open-health"
    )
    allow_insecure_public: bool = setting(False, "Listen beyond loopback even without TLS and credentials.")

    @property
    def authenticates(self) -> bool:
        return self.token_file is not None or self.tls_client_ca is not None

    @property
    def operator_names(self) -> frozenset[str]:
        return frozenset(names_in(self.operators))


@dataclasses.dataclass(frozen=True, slots=True)
class TenantConfig:
    """Limits for each tenant. `engine.tenant_running_limit` is how many requests of one may run at once."""

    waiting_limit: int = setting(0, "Maximum waiting requests of one tenant; 0 is unlimited.")
    tokens_per_minute: int = setting(
        0, "Maximum prompt and output tokens of one tenant per minute; 0 is unlimited."
    )
    ram_bytes: int = setting(0, "Maximum bytes of the RAM tier for one tenant's blocks; 0 is all of it.")
    ssd_bytes: int = setting(0, "Maximum bytes of the SSD tier for one tenant's blocks; 0 is all of it.")
    shared_prefixes: str | None = setting(
        None,
        "Tenants, comma-separated, whose cached prompts others may start from; `a=b+c` allows b and c only.",
        flag="--shared-prefixes",
    )

    normalized_prompts: str | None = setting(
        None,
        "Tenants, comma-separated, whose prompts are stable unless a request says otherwise: volatile "
        "billing lines are removed, tools put in a stable order, and earlier replies kept as they were "
        "generated. `*` is every tenant.",
        flag="--normalized-prompts",
    )

    def normalizes(self, tenant: str) -> bool:
        named = names_in(self.normalized_prompts)
        return "*" in named or tenant in named

    @property
    def shared_prefix_grants(self) -> Mapping[str, frozenset[str] | None]:
        """Tenants that may start from the prompts of each shared tenant; None: all tenants."""
        grants = (part.partition("=") for part in names_in(self.shared_prefixes))
        return {
            name.strip(): frozenset(names_in(others, "+")) if equals else None
            for name, equals, others in grants
        }
