"""Names that the front answers to.

A browser can be led here by a name that somebody else points at this address (DNS rebinding), and would take
the answers for that page's own. So requests for a name that is not known to be this machine's are refused. So
are those with a token, since a page can send any. Addresses cannot be pointed elsewhere, and over TLS the
certificate is not for such a name.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Collection

from icehouse_http.errors import ApiError

ANY_NAME = "*"
_SHOWN = 100


class OwnNames:
    """Tells which `Host` headers mean this front: addresses, localhost and the names it is given."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}

    def check(self, host: str | None) -> None:
        """Refuse another name; raises ApiError. A probe of HTTP/1.0 may send none, a browser always does."""
        if host is None or ANY_NAME in self._names or self._is_own(host):
            return
        message = (
            f"this server is not {host[:_SHOWN]!r}; use its address, or list the name in http.names "
            "(--name of icehouse-http)"
        )
        raise ApiError(421, message, code="name_not_known")

    def _is_own(self, host: str) -> bool:
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
            return name.removesuffix(".") in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False
