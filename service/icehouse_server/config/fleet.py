"""Fleet settings: what makes a server a worker behind a gateway, and what gateways are told of its blocks."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import MIB, setting


@dataclasses.dataclass(frozen=True, slots=True)
class FleetConfig:
    """How gateways reach this server. All of it is off unless asked for."""

    worker_enabled: bool = setting(
        False,
        "Serve vllm.grpc.engine.VllmEngine beside the API, on the same port, for gateways such as SMG; needs "
        "the extra `fleet`.",
    )
    operator_kv_tokens_enabled: bool = setting(
        False,
        "Send operators the token ids of every tenant's blocks in KV events, which are prompts in another "
        "form. Needed by a gateway that routes all tenants' prompts by their tokens, as SMG does. If off, "
        "operators get only hashes of other tenants' blocks.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Events over gRPC are there for whoever may subscribe; over ZeroMQ they are off unless asked for."""

    zmq_endpoint: str | None = setting(
        None,
        "ZeroMQ endpoint for KV events, as llm-d reads them: `tcp://127.0.0.1:5557` or `tcp://*:5557` "
        "listens, `connect:tcp://host:5557` connects to a listening subscriber. Default: none. It asks for "
        "no credentials, so whoever reaches it can read prompts' tokens.",
        flag="--kv-events-zmq-endpoint",
    )
    zmq_topic: str | None = setting(
        None,
        "Topic of the ZeroMQ messages. Default: `kv@<address>@<model>`, with the server's address and the "
        "model's name.",
        flag="--kv-events-zmq-topic",
    )
    zmq_tenant: str | None = setting(
        None,
        "Tenant whose blocks are published over ZeroMQ, whose messages cannot name one. "
        "Default: the default one.",
        flag="--kv-events-zmq-tenant",
    )
    interval_ms: float = setting(
        50.0, "How often changes are sent to subscribers.", minimum=1, flag="--kv-events-interval-ms"
    )
    replay_bytes: int = setting(
        32 * MIB,
        "Memory for events kept for subscribers that fall behind or reconnect; too slow a "
        "subscriber starts over.",
        minimum=64 * 1024,
        flag="--kv-events-replay-bytes",
    )
    block_limit: int = setting(
        262_144,
        "Maximum blocks that are reported; each takes some 1.5 kB while there are subscribers.",
        minimum=1,
        flag="--kv-events-block-limit",
    )
