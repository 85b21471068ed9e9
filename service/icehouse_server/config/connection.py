"""Settings of the connections beneath the calls: how many, how long, how slow, how chatty."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import setting

KIB = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """What one connection may cost, whoever is at its other end."""

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
        600.0,
        "A connection without calls is closed after this time; 0 keeps it.",
        minimum=0,
        flag="--connection-idle-s",
    )
    max_age_s: float = setting(
        0.0,
        "A connection accepts no new calls after this time, so that balancers can move it; 0 is unlimited.",
        minimum=0,
        flag="--connection-max-age-s",
    )
    max_age_grace_s: float = setting(
        600.0,
        "How long running calls may continue on a connection that reached its maximum age.",
        minimum=0,
        flag="--connection-max-age-grace-s",
    )
