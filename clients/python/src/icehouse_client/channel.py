"""What every channel is opened with: sizes, and the published service config.

The config (`service_config.json`, one for all client libraries) has gRPC itself try a Generate again that
no server took (UNAVAILABLE), and pass over servers that say they do not serve. Streams are never repeated.
"""

from __future__ import annotations

import importlib.resources

from icehouse_client.proxies import is_local
from icehouse_client.security import ChannelOptions, Security

SERVICE_CONFIG = importlib.resources.files("icehouse_client").joinpath("service_config.json").read_text()

SERVICE = "icehouse.v1.InferenceService"
"""What health is asked for: it serves when the server does."""


_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
"""Of addresses that gRPC alone can read."""


def address_problem(address: str) -> str:
    """Return why what somebody has typed is no address, to be read behind it; "" where it may be one."""
    host, colon, port = address.rpartition(":")
    if address.startswith(_SCHEMES):
        return ""
    if "://" in address:
        return "is a URL"
    if not (colon and port):
        return "has no port"
    if not host:
        return "has no host"
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        return f"has the port {port!r}, which is not a number from 1 to 65535"
    return ""


def check_address(address: str) -> None:
    """Raise ValueError for no address, which gRPC would take and fail with at the first call."""
    if not address.strip():
        raise ValueError(
            f"the address is {address!r}; it must be host:port, such as localhost:50051, or unix:/path"
        )


def channel_options(
    address: str, security: Security, *, watches_health: bool, more: ChannelOptions
) -> list[tuple[str, str | int]]:
    """Return the options of a channel to an address, of which `more` replaces ours.

    Without `watches_health` servers are used whatever their health says: for those that answer health
    checks only to callers with credentials, which gRPC does not send with them.
    """
    options: ChannelOptions = (
        # A prompt's tokens or a long output may pass gRPC's 4 MB.
        ("grpc.max_receive_message_length", -1),
        ("grpc.service_config", SERVICE_CONFIG),
        *(() if watches_health else (("grpc.inhibit_health_checking", 1),)),
        *((("grpc.enable_http_proxy", 0),) if is_local(address) else ()),
    )
    # gRPC takes the first of two with the same name.
    return list({**dict(security.channel_options(options)), **dict(more)}.items())
