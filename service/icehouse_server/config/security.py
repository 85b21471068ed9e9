"""Settings of who may connect, and as whom."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Certificates, tokens, tenants. Without any of it whoever reaches the address may do everything."""

    tls_certificate: str | None = setting(
        None, Kind.PATH, "PEM file with the server's certificate chain; switches TLS on."
    )
    tls_key: str | None = setting(None, Kind.PATH, "PEM file with the certificate's private key.")
    tls_client_ca: str | None = setting(
        None,
        Kind.PATH,
        "PEM file with the authorities of client certificates; every client then needs one.",
    )
    token_file: str | None = setting(
        None,
        Kind.PATH,
        "File of hashed bearer tokens, from `icehouse token new`; every call then needs one.",
    )
    operators: str | None = setting(
        None,
        Kind.TEXT,
        "Names in client certificates, comma-separated, that may act for all tenants.",
    )
    reload_s: float = setting(
        5.0,
        Kind.SECONDS,
        "How often certificate and token files are checked for changes.",
        minimum=0.1,
        flag="--security-reload-s",
    )
    health_open: bool = setting(
        True, Kind.SWITCH, "Answer health checks of callers without credentials.", flag="--open-health"
    )
    allow_insecure_public: bool = setting(
        False,
        Kind.SWITCH,
        "Listen beyond loopback even without TLS and credentials.",
    )

    @property
    def authenticates(self) -> bool:
        """Whether callers must say who they are."""
        return self.token_file is not None or self.tls_client_ca is not None

    @property
    def operator_names(self) -> frozenset[str]:
        """`operators` as a set."""
        return frozenset(name.strip() for name in (self.operators or "").split(",") if name.strip())
