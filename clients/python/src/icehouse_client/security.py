"""How a client proves who it is, and how it knows the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import grpc

from icehouse_client.tokens import TokenSource

Metadata = tuple[tuple[str, str], ...]
ChannelOptions = Sequence[tuple[str, str | int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Security:
    """TLS and credentials of a connection. PEM contents, not paths.

    `is_tls` alone trusts the system's authorities, `ca_pem` one of your own. `certificate_pem` and
    `key_pem` are the client's, for mTLS. `token` goes with every call as a bearer token.
    `server_name` is expected in the server's certificate when it differs from the address.
    Raises ValueError for a certificate without its key and the other way round.
    A `token` that can be called is a source: its token is kept until the server refuses it, and then it is
    called again, and the call with the refused token made again.
    """

    token: str | TokenSource = dataclasses.field(default="", repr=False)
    is_tls: bool = False
    ca_pem: bytes | None = None
    certificate_pem: bytes | None = None
    key_pem: bytes | None = dataclasses.field(default=None, repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate_pem is None) != (self.key_pem is None):
            # gRPC itself would end the process.
            raise ValueError(
                "certificate_pem and key_pem go together: mTLS needs your certificate and its key"
            )

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """What gRPC secures the channel with; None for a plain one."""
        if not (self.is_tls or self.ca_pem or self.certificate_pem):
            return None
        return grpc.ssl_channel_credentials(self.ca_pem, self.key_pem, self.certificate_pem)

    def channel_options(self, options: ChannelOptions) -> list[tuple[str, str | int]]:
        """Return `options` and what this adds to them."""
        named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*options, *named]


NO_SECURITY = Security()
