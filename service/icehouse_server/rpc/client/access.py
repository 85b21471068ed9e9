"""Channel to a server, plain or secured, and the credentials that go with each call."""

from __future__ import annotations

import dataclasses

import grpc


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a secured server asks of its callers. PEM contents, not paths; empty for an open server.

    `is_tls` alone trusts the authorities that gRPC brings, `root_certificates` others. `certificate` and
    `key` are the caller's own, for mTLS.
    """

    is_tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    token: str = dataclasses.field(default="", repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open_channel(self, address: str) -> grpc.Channel:
        """Return a channel to host:port or unix:/path; the first call connects."""
        if not (self.is_tls or self.root_certificates or self.certificate):
            return grpc.insecure_channel(address)
        credentials = grpc.ssl_channel_credentials(self.root_certificates, self.key, self.certificate)
        return grpc.secure_channel(address, credentials)


OPEN = Access()
"""Of a server without TLS and credentials."""
