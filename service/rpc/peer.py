"""How a caller reached the server, from gRPC's name for the other end."""

from __future__ import annotations

import ipaddress
import urllib.parse

from service.domain.call import PeerKind


def peer_kind(peer: str | None) -> PeerKind:
    """Return the kind of "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711" or "unix:"."""
    scheme, _, rest = (peer or "").partition(":")
    if scheme in ("unix", "unix-abstract"):
        return PeerKind.UNIX
    if scheme not in ("ipv4", "ipv6"):
        return PeerKind.UNKNOWN
    # gRPC writes the brackets of an IPv6 address as %5B and %5D.
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return PeerKind.UNKNOWN
    mapped = getattr(address, "ipv4_mapped", None) or address
    return PeerKind.LOOPBACK if mapped.is_loopback else PeerKind.NETWORK
