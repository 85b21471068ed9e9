"""gRPC's channel arguments from the settings, each with its reason."""

from __future__ import annotations

from service.config import ConnectionConfig, ServerConfig

_UNLIMITED_MS = 2**31 - 1
"""What gRPC takes for "never"."""


def server_options(server: ServerConfig, connection: ConnectionConfig) -> list[tuple[str, int]]:
    """Return the arguments of the one server."""
    return [
        ("grpc.max_receive_message_length", server.max_message_bytes),
        # Answers are as long as the request allowed: the tokens of a long prompt, a long output.
        ("grpc.max_send_message_length", -1),
        # Otherwise Linux lets two servers share a port, and each gets half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(server.channelz_enabled)),
        ("grpc.max_allowed_incoming_connections", connection.connection_limit),
        ("grpc.max_concurrent_streams", connection.stream_limit),
        # The soft limit turns calls away at random from half of the hard one on; one limit is enough.
        ("grpc.max_metadata_size", connection.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", connection.max_metadata_bytes),
        ("grpc.server_handshake_timeout_ms", _ms(connection.handshake_timeout_s)),
        # Notice a caller whose machine has vanished: its sequence costs memory.
        ("grpc.keepalive_time_ms", _ms(connection.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(connection.keepalive_timeout_s)),
        # Gateways ping every 10 s, calls or not; gRPC's own limit of 5 minutes would cut them off. What
        # comes faster is counted, and the third such ping ends the connection with too_many_pings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(connection.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.max_connection_idle_ms", _ms(connection.idle_s) or _UNLIMITED_MS),
        ("grpc.max_connection_age_ms", _ms(connection.max_age_s) or _UNLIMITED_MS),
        ("grpc.max_connection_age_grace_ms", _ms(connection.max_age_grace_s)),
    ]


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), _UNLIMITED_MS)
