"""Caller: who calls, as proved by a certificate or a token, and over what kind of connection."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import ipaddress
import urllib.parse

from icehouse_server.domain.call import PeerKind
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import Forbidden, Reason


class CallerRole(enum.StrEnum):
    """What a caller may do."""

    TENANT = "tenant"
    """Run its own prompts and command its own blocks."""
    OPERATOR = "operator"
    """Act for every tenant and command the whole cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """One identity. `tenant` is None if callers need not prove who they are."""

    tenant: Tenant | None
    role: CallerRole

    @property
    def scope(self) -> Tenant | None:
        """The tenant whose numbers and blocks the caller may see; None for everybody's."""
        return None if self.role is CallerRole.OPERATOR else self.tenant

    def require_operator(self, what: str) -> None:
        """Raise Forbidden unless this is an operator; `what` begins the message."""
        if self.role is not CallerRole.OPERATOR:
            raise Forbidden(
                Reason.OPERATOR_ONLY,
                f"{what} concerns every tenant, so only operators may call it; {self.tenant!r} is not one",
                metadata={"tenant": self.tenant, "role": self.role.value},
            )


UNPROVED = Caller(None, CallerRole.OPERATOR)
"""Everyone, if the configuration requires no credentials."""

current: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=UNPROVED)
"""Set by the interceptor for the task of one call, before its message is read."""

origin: contextvars.ContextVar[str] = contextvars.ContextVar("origin", default="")
"""Whose shares this task's call counts against: those of a proved tenant, otherwise those of the connection.
Set with `current`."""


def peer_kind(peer: str | None) -> PeerKind:
    """Return the kind of "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711" or "unix:"."""
    scheme, _, rest = (peer or "").partition(":")
    if scheme in ("unix", "unix-abstract"):
        return PeerKind.UNIX
    if scheme not in ("ipv4", "ipv6"):
        return PeerKind.UNKNOWN
    # gRPC writes the brackets of an IPv6 address as %5B and %5D.
    return _kind_of_host(urllib.parse.unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0])


@functools.lru_cache(maxsize=1024)
def _kind_of_host(host: str) -> PeerKind:
    """Return the kind of an address. Cached: parsing takes as long as the rest of a refused call's log."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return PeerKind.UNKNOWN
    mapped = getattr(address, "ipv4_mapped", None) or address
    return PeerKind.LOOPBACK if mapped.is_loopback else PeerKind.NETWORK
