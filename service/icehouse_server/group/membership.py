"""Membership: which machines form a group, which one this is, and what must be equal on all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icehouse_server.domain.ids import Fingerprint
from icehouse_server.errors import ConfigError, Reason
from icehouse_server.small_file import read_small_file

_RING_PORT = 32323
"""The port from which mlx.launch counts."""
CONTROL_PORT = 32322
_NUMBER = re.compile(r"[0-9]{1,5}")
_TOLD_LIMIT = 100
"""Characters of a wrong file that a message shows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """A group as one of its ranks knows it."""

    rank: int
    ring: tuple[tuple[str, ...], ...]
    """Addresses of each rank for the ring, "host:port"."""
    control: str
    """Where rank 0 listens for the others."""

    @property
    def world(self) -> int:
        return len(self.ring)

    @property
    def followers(self) -> range:
        return range(1, self.world)

    @property
    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks: otherwise they would wait for each other in the ring."""
        return {"the file of hosts": " ".join(",".join(addresses) for addresses in self.ring)}

    def host(self, rank: int) -> str:
        """Return the name or address of a rank's machine."""
        return self.ring[rank][0].rpartition(":")[0]


def membership_of(
    hosts: str, *, rank: int | None, launched_as: str | None, control: str | None
) -> Membership:
    """Read a file of hosts in one of the forms that MLX knows; raises ConfigError.

    It is either mlx.launch's, a list of {"ssh": name, "ips": [address, ...]}, or the ring's, a list with a
    list of "host:port" for each rank. `launched_as` is the rank from mlx.launch, used if `rank` is None.
    """
    entries = _read(hosts)
    if not isinstance(entries, list):
        raise _invalid(f"the file {hosts} does not contain a list of hosts")
    ring = tuple(_addresses(entry, number, hosts) for number, entry in enumerate(entries))
    named = [address for addresses in ring for address in addresses]
    if twice := sorted({address for address in named if named.count(address) > 1}):
        raise _invalid(f"{hosts} names {twice[0]} twice; each rank needs its own address")
    if len(ring) < 2:
        raise _invalid(f"{hosts} names {len(ring)} hosts; a group has at least two")
    if rank is None and launched_as is not None and _NUMBER.fullmatch(launched_as):
        rank = int(launched_as)
    if rank is None or not 0 <= rank < len(ring):
        raise _invalid(
            f"which of the {len(ring)} hosts is this? Pass --group-rank 0 to {len(ring) - 1}, or let "
            "mlx.launch set MLX_RANK"
        )
    if control is not None and not _is_address(control):
        raise ConfigError(
            Reason.CONFIG_INVALID, f"group.control = {control!r} is not host:port", field="group.control"
        )
    return Membership(rank, ring, control or f"{ring[0][0].rpartition(':')[0]}:{CONTROL_PORT}")


def _read(hosts: str) -> Any:
    try:
        return json.loads(read_small_file(Path(hosts).expanduser()).content.decode("utf-8"))
    except OSError as error:
        raise _invalid(f"the hosts in {hosts} cannot be read: {error.strerror}; check --group") from error
    except RuntimeError as error:
        # Nested too deeply, or the home folder of an unknown user.
        is_nested = isinstance(error, RecursionError)
        what = "is not valid JSON: it is nested too deeply" if is_nested else f"cannot be read: {error}"
        raise _invalid(f"the file {hosts} {what}") from error
    except ValueError as error:
        raise _invalid(f"the file {hosts} is not valid JSON: {_first_words(error)}") from error


def _addresses(entry: Any, number: int, hosts: str) -> tuple[str, ...]:
    addresses = entry
    if isinstance(entry, Mapping):
        ips = entry.get("ips")
        ips = ips if isinstance(ips, list) else []
        addresses = [f"{ip}:{_RING_PORT + number}" for ip in ips[:1] if isinstance(ip, str)]
    if not isinstance(addresses, list) or not addresses or not all(map(_is_address, addresses)):
        raise _invalid(
            f"in {hosts} host {number}, {_first_words(json.dumps(entry))}, is neither "
            '{"ssh": "name", "ips": ["address"]} nor ["host:port"]'
        )
    return tuple(addresses)


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    return bool(host) and _NUMBER.fullmatch(port) is not None and 0 < int(port) < 1 << 16


def _first_words(what: object) -> str:
    return str(what)[:_TOLD_LIMIT]


def _invalid(message: str) -> ConfigError:
    return ConfigError(Reason.CONFIG_INVALID, message, field="group.hosts")


def rank_fingerprint(model: Fingerprint, membership: Membership) -> Fingerprint:
    """Return the fingerprint of one rank's part of a model: no other rank can take its blocks for its own."""
    part = f"icehouse.rank.v1\0{membership.rank} of {membership.world}".encode()
    return Fingerprint(hashlib.sha256(part + model).digest())


def releases() -> dict[str, str]:
    """Return the releases that must be equal on all ranks."""
    return {name: importlib.metadata.version(name) for name in ("icehouse", "mlx", "mlx-lm")}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first fact that differs between rank 0 and another rank; empty if they agree."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'nothing')} there and {ours.get(name, 'nothing')} on rank 0"
    return ""
