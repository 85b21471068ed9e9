"""Scenario of clients/scenarios.json, by the name of its test."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Self

SCENARIOS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "scenarios.json").read_text(encoding="utf-8")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One entry of the file, and the servers that it may be run against."""

    name: str
    input: dict[str, Any]
    expect: dict[str, Any]
    address: str
    servers: dict[str, Any]
    """What ICEHOUSE_TEST_SERVERS says: see tests/system/clients/live_servers.py."""

    @classmethod
    def of(cls, name: str, *, servers: dict[str, Any]) -> Self:
        """Return the entry of a name."""
        entry = SCENARIOS[name]
        return cls(name, entry["input"], entry["expect"], servers[entry["server"]], servers)

    @property
    def own_name(self) -> str:
        """A name that no other test has: for a request, or for a tenant of the cache."""
        return f"python-{self.name}-{os.getpid()}"

    @property
    def text(self) -> str:
        """The prompt."""
        if "text" in self.input:
            return str(self.input["text"])
        return str(self.input["text_unit"]) * int(self.input["repeat"])
