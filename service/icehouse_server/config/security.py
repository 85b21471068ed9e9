"""Settings of who may connect, and as whom."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Certificates, tokens, tenants. Without any of it whoever reaches the address may do everything."""

    tls_certificate: str | None = setting(
        None, "PEM file with the server's certificate chain; switches TLS on.", kind=Kind.PATH
    )
    tls_key: str | None = setting(None, "PEM file with the certificate's private key.", kind=Kind.PATH)
    tls_client_ca: str | None = setting(
        None,
        "PEM file with the authorities of client certificates; every client then needs one.",
        kind=Kind.PATH,
    )
    token_file: str | None = setting(
        None,
        "File of hashed bearer tokens, from `icehouse token new`; every call then needs one.",
        kind=Kind.PATH,
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
        """Whether callers must say who they are."""
        return self.token_file is not None or self.tls_client_ca is not None

    @property
    def operator_names(self) -> frozenset[str]:
        """`operators` as a set."""
        return frozenset(name.strip() for name in (self.operators or "").split(",") if name.strip())
