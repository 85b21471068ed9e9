"""Check: one answered question of `icehouse doctor`."""

from __future__ import annotations

import dataclasses
import enum


class Verdict(enum.StrEnum):
    """How a check ended. FAIL means that `icehouse serve` would not start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One answered question; `advice` says what to do unless all is well."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""
