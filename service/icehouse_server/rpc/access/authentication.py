"""Authentication: from a call's credentials to its caller.

Where there is a token file every call needs a token, and the token alone says who calls: a client
certificate may then belong to a proxy. Without one the client certificate says it: its first URI name
(as SPIFFE writes it), else its first DNS name. The common name is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import Reason, Unauthenticated
from icehouse_server.rpc.access.caller import UNPROVED, Caller, Role
from icehouse_server.rpc.access.tokens import TokenFile

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]

_SCHEME = "bearer "
_NAME_BYTE_LIMIT = 128


class Authenticator:
    """Knows who calls. Owned by the event loop."""

    def __init__(
        self,
        *,
        tokens: TokenFile | None,
        by_certificate: bool,
        operator_names: frozenset[str],
        clock: Clock,
    ) -> None:
        self._tokens = tokens
        self._by_certificate = by_certificate
        self._operator_names = operator_names
        self._clock = clock

    @property
    def is_on(self) -> bool:
        """Whether callers must prove who they are."""
        return self._tokens is not None or self._by_certificate

    def identify(self, metadata: Metadata, auth_context: AuthContext) -> Caller:
        """Return who calls; raises Unauthenticated."""
        if self._tokens is not None:
            return self._by_token(self._tokens, metadata)
        return self._by_name(auth_context) if self._by_certificate else UNPROVED

    def _by_token(self, tokens: TokenFile, metadata: Metadata) -> Caller:
        given = [value for key, value in metadata if key == "authorization"]
        if not given:
            raise Unauthenticated(
                Reason.CREDENTIALS_MISSING,
                "this server wants a token; send the metadata `authorization: Bearer <token>`",
            )
        if len(given) > 1 or not isinstance(given[0], str) or given[0][: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated(
                Reason.CREDENTIALS_INVALID,
                "the metadata `authorization` must be there once and read `Bearer <token>`",
            )
        caller = tokens.find(given[0][len(_SCHEME) :].strip(), now=self._clock.wall())
        if caller is None:
            raise Unauthenticated(
                Reason.CREDENTIALS_INVALID,
                "the token is not known here or has expired; ask the server's operator for one",
            )
        return caller

    def _by_name(self, auth_context: AuthContext) -> Caller:
        names = [*auth_context.get("peer_uri", ()), *auth_context.get("peer_dns", ())]
        if not names:
            raise Unauthenticated(
                Reason.CREDENTIALS_INVALID,
                "the client certificate has no URI or DNS name among its subject alternative names",
            )
        name = names[0].decode("utf-8", "replace")
        if len(names[0]) > _NAME_BYTE_LIMIT:
            raise Unauthenticated(
                Reason.CREDENTIALS_INVALID,
                f"the client certificate's name has {len(names[0])} bytes, the limit is {_NAME_BYTE_LIMIT}",
            )
        role = Role.OPERATOR if name in self._operator_names else Role.TENANT
        return Caller(Tenant(name), role)
