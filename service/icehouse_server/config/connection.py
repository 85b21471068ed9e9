"""Settings of the connections beneath the calls: how many, how long, how slow, how chatty."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import Kind, setting

KIB = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """What one connection may cost, whoever is at its other end."""

    connection_limit: int = setting(
        1024,
        Kind.COUNT,
        "Connections open at once; more are closed as they come.",
        minimum=1,
        flag="--connection-limit",
    )
    stream_limit: int = setting(
        256,
        Kind.COUNT,
        "Calls at once on one connection; a client keeps more back until some have ended.",
        minimum=1,
        flag="--stream-limit",
    )
    max_metadata_bytes: int = setting(
        16 * KIB, Kind.BYTES, "Most metadata of one call.", minimum=1024, maximum=1024 * KIB
    )
    handshake_timeout_s: float = setting(
        20.0, Kind.SECONDS, "How long TLS and HTTP/2 may take to agree.", minimum=0.1
    )
    message_timeout_s: float = setting(
        60.0,
        Kind.SECONDS,
        "How long a call's request message may take to arrive.",
        minimum=0.1,
    )
    min_ping_interval_s: float = setting(
        8.0,
        Kind.SECONDS,
        "Pings may come as often, with or without calls; who pings more is disconnected.",
        minimum=0.01,
    )
    keepalive_s: float = setting(
        60.0, Kind.SECONDS, "After so long a silence the server pings, to notice a lost peer.", minimum=1
    )
    keepalive_timeout_s: float = setting(
        20.0, Kind.SECONDS, "How long a lost peer's connection waits for the ping's answer.", minimum=0.1
    )
    idle_s: float = setting(
        600.0,
        Kind.SECONDS,
        "A connection without calls is closed after so long; 0 keeps it.",
        minimum=0,
        flag="--connection-idle-s",
    )
    max_age_s: float = setting(
        0.0,
        Kind.SECONDS,
        "A connection takes no new calls after so long, so that balancers may move it; 0 is unlimited.",
        minimum=0,
        flag="--connection-max-age-s",
    )
    max_age_grace_s: float = setting(
        600.0,
        Kind.SECONDS,
        "How long the calls of a connection that is too old may still run.",
        minimum=0,
        flag="--connection-max-age-grace-s",
    )
