"""Settings of image sources: folders and hosts that a request may name an image in, as they are listed."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Callable
from typing import Final, TypeVar

from icehouse_server.config import ServerConfig
from icehouse_server.errors import ConfigError, Reason

Item = TypeVar("Item")

_COUNT_LIMIT: Final = 64
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.\-]{0,252}")


@dataclasses.dataclass(frozen=True, slots=True)
class ImageHost:
    """A host that may be asked for images."""

    name: str
    """In lower case; an address as `ipaddress` writes it."""
    port: int | None = None
    """None for the port of the scheme: 443 and 80."""


def hosts_of(config: ServerConfig) -> tuple[ImageHost, ...]:
    """Return the hosts that may be asked for images; raises ConfigError."""
    return _listed("image_hosts", config.image_hosts, read_image_hosts)


def folders_of(config: ServerConfig) -> tuple[str, ...]:
    """Return the folders that images may be read in; raises ConfigError."""
    return _listed("image_folders", config.image_folders, read_image_folders)


def read_image_hosts(text: str | None) -> tuple[ImageHost, ...]:
    """Return the hosts that a setting lists; raises ValueError with a complaint that follows the value."""
    return tuple(_host_of(part) for part in _parts(text))


def read_image_folders(text: str | None) -> tuple[str, ...]:
    """Return the folders that a setting lists; raises ValueError with a complaint that follows the value."""
    folders = tuple(os.path.expanduser(part) for part in _parts(text))
    for folder in folders:
        if not os.path.isabs(folder) or os.path.normpath(folder) != folder.rstrip("/") or "\0" in folder:
            raise ValueError(f"lists {folder!r}, which is no folder's whole path, such as /srv/pictures")
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
        raise ValueError(f"lists {len(parts)}, and the limit is {_COUNT_LIMIT}")
    return parts


def _host_of(part: str) -> ImageHost:
    name, colon, port = part.rpartition(":")
    if not colon or (":" in name and not name.startswith("[")) or port.endswith("]"):
        name, port = part, ""  # no port: a name, or an address of IPv6
    try:
        number = int(port) if port else None
    except ValueError:
        number = -1
    if number is not None and not 1 <= number <= 65535:
        raise ValueError(f"lists {part!r}, whose port is none from 1 to 65535")
    bare = name.removeprefix("[").removesuffix("]").lower()
    try:
        return ImageHost(str(ipaddress.ip_address(bare)), number)
    except ValueError:
        if _NAME.fullmatch(bare) is None:
            raise ValueError(
                f"lists {part!r}, which is no host; write images.example.org or 10.0.0.7:8080"
            ) from None
        return ImageHost(bare, number)
