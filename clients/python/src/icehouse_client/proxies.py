"""Proxies of the environment, which gRPC asks for every TCP address: none is for a server on this machine.

A proxy elsewhere would look for the server on its own machine. What `no_proxy` excepts, gRPC excepts itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse
import urllib.request

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""In the order in which gRPC looks for them."""
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_SOCKET_SCHEMES = ("unix:", "unix-abstract:", "vsock:")
_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|passthrough):(?://[^/]*/)?", re.IGNORECASE)


def is_local(address: str) -> bool:
    """Return whether all that a gRPC target names is this machine, by its looks: no name is resolved."""
    if address.lower().startswith(_SOCKET_SCHEMES):
        return True
    places = urllib.parse.unquote(_SCHEME.sub("", address, count=1)).split(",")
    return all(_is_local_host(_host_of(place)) for place in places)


def proxy_variable(address: str) -> str | None:
    """Return the environment's variable whose proxy gRPC asks for an address; None where it asks none."""
    if is_local(address):
        return None
    excepted = next((found for name in _EXCEPTIONS if (found := os.environ.get(name))), "")
    host = _host_of(_SCHEME.sub("", address, count=1))
    if urllib.request.proxy_bypass_environment(host, {"no": excepted}):  # type: ignore[attr-defined]
        return None
    return next((name for name in _VARIABLES if os.environ.get(name)), None)


def _host_of(place: str) -> str:
    """Return the host of "host:port", of "[::1]:port" and of either without a port."""
    if place.startswith("["):
        return place[1:].partition("]")[0]
    host, colon, _ = place.partition(":")
    return place if place.count(":") > 1 else host if colon else place


def _is_local_host(host: str) -> bool:
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    # What listens everywhere listens here, and a system connects it so.
    return (mapped or found).is_loopback or found.is_unspecified
