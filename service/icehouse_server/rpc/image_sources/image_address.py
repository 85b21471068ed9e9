"""Image address: the file or web resource that a URI names, if the settings allow it. Pure functions.

Nothing is opened here. A path or host that is not allowed gets the same error whether or not it exists.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Final, TypeVar

from icehouse_server.config import ServerConfig
from icehouse_server.errors import ConfigError, InvalidRequest, Reason, SourceUnreachable

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LENGTH_LIMIT: Final = 8192
_PRINTABLE: Final = re.compile(r"[!-~]+")
"""Characters of a URI: no space, and no line break that would end a request line."""
_PORTS: Final = {"https": 443, "http": 80}
_LOOKED_AT: Final = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones in networks without IPv4 (RFC 6052)."""
_GLOBAL: Final = ipaddress.ip_network("2000::/3")
_SPECIAL: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24"),
        *("2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
)
"""Networks in IANA's special-purpose registries that some version of `ipaddress` takes for global: relays,
anycast and documentation, where nobody serves images."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileAddress:
    """A file below an allowed folder."""

    folder: str
    names: tuple[str, ...]
    """Path components from the folder down to the file. None is empty, ".", ".." or has a slash."""


@dataclasses.dataclass(frozen=True, slots=True)
class WebAddress:
    """A resource on an allowed host."""

    is_secure: bool
    host: str
    """A host name, or an address as `ipaddress` writes it."""
    port: int
    target: str
    """Path and query, as in the request line."""
    uri: str = dataclasses.field(repr=False)

    @property
    def authority(self) -> str:
        """Host and port, as in the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class SourceRules:
    """Which files and hosts images may be read from."""

    folders: tuple[str, ...] = ()
    hosts: frozenset[ImageHost] = frozenset()

    @classmethod
    def of(cls, config: ServerConfig) -> SourceRules:
        return cls(
            _listed("image_folders", config.image_folders, read_image_folders),
            frozenset(_listed("image_hosts", config.image_hosts, read_image_hosts)),
        )

    def address_of(self, uri: str, *, field: str) -> FileAddress | WebAddress:
        """Return what a URI names; raises InvalidRequest if it may not be read."""
        scheme = uri[:6].partition(":")[0].lower()
        if scheme == "file" and self.folders:
            return self._file(uri, field)
        if scheme in _PORTS and self.hosts:
            return self.web_address_of(uri, field=field)
        known = ['"data:image/png;base64,..."']
        known += ["a file: URL of an allowed folder"] if self.folders else []
        known += ["an http(s) URL of an allowed host"] if self.hosts else []
        raise refused(field, f"begins with {uri[:12]!r}; this server accepts {' or '.join(known)}")

    def web_address_of(self, uri: str, *, field: str) -> WebAddress:
        """Return what an http(s) URL names, which may come from a redirect; raises InvalidRequest."""
        parts = _split(uri, field)
        try:
            name, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise refused(field, "is not an http(s) URL with a host") from None
        if "@" in parts.netloc:
            raise refused(field, "has a user name in its URL; the server sends no credentials")
        literal = ip_address_of(name)
        host = name if literal is None else str(literal)
        if not self._allows(host, port, scheme=parts.scheme):
            raise refused(field, "is on a host or port that the server may not fetch images from")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return WebAddress(parts.scheme == "https", host, port, target, uri)

    def reaches(self, address: IpAddress, port: int, *, host: str, is_secure: bool) -> bool:
        """Whether a connection for an allowed host may go to this address.

        A name may lead only to public addresses, and to addresses that are allowed themselves: the owner of a
        name must not choose what is reached inside this network.
        """
        scheme = "https" if is_secure else "http"
        return str(address) == host or is_public(address) or self._allows(str(address), port, scheme=scheme)

    def _allows(self, host: str, port: int, *, scheme: str) -> bool:
        is_usual = port == _PORTS[scheme]
        return ImageHost(host, port) in self.hosts or (is_usual and ImageHost(host) in self.hosts)

    def _file(self, uri: str, field: str) -> FileAddress:
        parts = _split(uri, field)
        if parts.netloc.lower() not in ("", "localhost") or parts.query or "?" in uri or "#" in uri:
            raise refused(field, "is not a file: URL with a path, such as file:///srv/pictures/cat.png")
        name = urllib.parse.unquote(parts.path, errors="surrogateescape")
        # Two leading slashes are treated as one, although POSIX leaves their meaning to the system.
        path = PurePosixPath(f"/{name.lstrip('/')}")
        above = [each for each in self.folders if PurePosixPath(each) in path.parents]
        if not above or not name.startswith("/") or ".." in path.parts or "\0" in name:
            raise refused(field, "is not in a folder that the server may read images from")
        folder = max(above, key=len)
        return FileAddress(folder, path.relative_to(folder).parts)


def ip_address_of(host: str) -> IpAddress | None:
    """Return the IP address if a host is written as one, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: IpAddress) -> bool:
    """Whether an address is on the public internet, not on this machine or a private network."""
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _LOOKED_AT:
        return is_public(ipaddress.IPv4Address(address.packed[-4:]))
    return address in _GLOBAL and address.is_global


def _split(uri: str, field: str) -> urllib.parse.SplitResult:
    if len(uri) > _LENGTH_LIMIT:
        raise refused(field, f"has a URL of {len(uri)} characters; the limit is {_LENGTH_LIMIT}")
    if _PRINTABLE.fullmatch(uri) is None or "\\" in uri:
        raise refused(field, "has a URL with a character that must be written as %XX")
    try:
        return urllib.parse.urlsplit(uri)
    except ValueError:
        raise refused(field, "has a URL that cannot be parsed") from None


Item = TypeVar("Item")

_COUNT_LIMIT: Final = 64
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.\-]{0,252}")


@dataclasses.dataclass(frozen=True, slots=True)
class ImageHost:
    """A host that may be asked for images."""

    name: str
    """In lower case; an address as `ipaddress` writes it."""
    port: int | None = None
    """None for the scheme's default port: 443 or 80."""


def read_image_hosts(text: str | None) -> tuple[ImageHost, ...]:
    """Return the hosts that a setting lists; raises ValueError, whose text follows the setting's name."""
    return tuple(_host_of(part) for part in _parts(text))


def read_image_folders(text: str | None) -> tuple[str, ...]:
    """Return the folders that a setting lists; raises ValueError, whose text follows the setting's name."""
    folders = tuple(os.path.expanduser(part) for part in _parts(text))
    for folder in folders:
        if not os.path.isabs(folder) or os.path.normpath(folder) != folder.rstrip("/") or "\0" in folder:
            raise ValueError(f"lists {folder!r}, which is not a plain absolute path, such as /srv/pictures")
    return tuple(folder.rstrip("/") for folder in folders)


def _listed(name: str, text: str | None, read: Callable[[str | None], tuple[Item, ...]]) -> tuple[Item, ...]:
    try:
        return read(text)
    except ValueError as error:
        field = f"server.{name}"
        raise ConfigError(Reason.CONFIG_INVALID, f"{field} {error}", field=field) from error


def _parts(text: str | None) -> list[str]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if len(parts) > _COUNT_LIMIT:
        raise ValueError(f"lists {len(parts)}; the limit is {_COUNT_LIMIT}")
    return parts


def _host_of(part: str) -> ImageHost:
    try:
        if (address := ip_address_of(part)) is not None:
            return ImageHost(str(address))
        split = urllib.parse.urlsplit(f"//{part}")
        name, port = split.hostname or "", split.port
    except ValueError:
        raise ValueError(f"lists {part!r}, whose port is not from 1 to 65535") from None
    address = ip_address_of(name)
    if port == 0 or split.netloc != part or "@" in part or (address is None and not _NAME.fullmatch(name)):
        raise ValueError(f"lists {part!r}, which is not a host; write images.example.org or 10.0.0.7:8080")
    return ImageHost(name if address is None else str(address), port)


def refused(field: str, complaint: str, **facts: object) -> InvalidRequest:
    """Return the error for an image that will never be read."""
    message = f"the image of {field} {complaint}"
    return InvalidRequest(Reason.IMAGE_INVALID, message, field=field, metadata=facts)


def too_long(field: str, limit_bytes: int) -> InvalidRequest:
    """Return the error for an image that exceeds the size limit."""
    complaint = f"has more than {limit_bytes} bytes, the limit for an image"
    return refused(field, complaint, limit_bytes=limit_bytes)


def unreachable(field: str, complaint: str, **facts: object) -> SourceUnreachable:
    """Return the error for an image that its host does not provide now."""
    message = f"the image of {field} {complaint}"
    return SourceUnreachable(Reason.IMAGE_UNREACHABLE, message, field=field, metadata=facts)
