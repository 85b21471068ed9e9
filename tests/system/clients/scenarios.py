"""Scenarios that every client runs, and the table of who passed which.

`clients/scenarios.json` says what happens in each; `clients/README.md` says how a client runs them and writes
its results down. A cell of the table that is empty is a failure, except in the columns of `NOT_YET`; a
dash is in `NOT_OFFERED`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

SCENARIOS_PATH: Final = Path(__file__).parents[3] / "clients" / "scenarios.json"
RESULTS_VARIABLE: Final = "ICEHOUSE_TEST_RESULTS"
"""Names the file to which a client's tests append a line for each scenario that they ran."""

NOT_YET: Final[Collection[str]] = ()
"""Clients whose tests do not run every scenario yet: none."""

NOT_OFFERED: Final[Mapping[str, Collection[str]]] = {
    "http": (
        "already_exists",
        "id_of_two_tenants",
        "permission_denied",
        "wait_ready",
        "wait_ready_coming",
        "wait_ready_absent",
        "wait_ready_loading",
        "retry_on_drain",
        "retry_limit",
        "unicode",
        "warm",
        "explain",
        "pin",
        "unpin",
        "evict",
        "verify",
        "watch_stats",
        "rerank",
        "get_server",
        "token_refresh",
        "call_metadata",
    )
}
"""Scenarios that a client has no way for: OpenAI's HTTP has no request ids, tenants and templates that the
caller chooses, no formats but JSON's, and no commands of the cache and of the server; when to try again is
its SDKs' own business."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one client's test of a scenario came to: a line of its results."""

    scenario: str
    passed: bool


def scenario_names() -> tuple[str, ...]:
    """Return the names of all, in the order of the file."""
    return tuple(json.loads(SCENARIOS_PATH.read_text(encoding="utf-8")))


def unserved(servers: Mapping[str, object]) -> tuple[str, ...]:
    """Return the scenarios whose server could not be started: its address in `servers` is empty."""
    found = json.loads(SCENARIOS_PATH.read_text(encoding="utf-8"))
    return tuple(name for name, scenario in found.items() if not servers[scenario["server"]])


def read_results(path: Path) -> tuple[Result, ...]:
    """Return what one client's tests wrote down; nothing where they ran no scenario."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(Result(str(line["scenario"]), line["passed"] is True) for line in map(json.loads, lines))


def table_of(names: Iterable[str], results: Mapping[str, Sequence[Result]]) -> str:
    """Return a line for each scenario with a column for each language: ok, FAIL, a dash or an empty cell."""
    names = tuple(names)
    width = max(map(len, names))
    rows = [f"{'':{width}}" + "".join(f"  {language:6}" for language in results)]
    for name in names:
        cells = "".join(
            f"  {_cell(language, name, told):{max(6, len(language))}}" for language, told in results.items()
        )
        rows.append(f"{name:{width}}{cells}")
    return "\n".join(row.rstrip() for row in rows)


def faults_of(names: Iterable[str], results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return what is wrong with the table: failures, unknown names, and cells that are empty."""
    names = tuple(names)
    faults = []
    for language, told in results.items():
        faults += [f"{language}: {result.scenario} failed" for result in told if not result.passed]
        ran = {result.scenario for result in told}
        faults += [f"{language}: {name} is no scenario" for name in sorted(ran - set(names))]
        if language not in NOT_YET:
            wanted = [name for name in names if name not in NOT_OFFERED.get(language, ())]
            faults += [f"{language}: {name} was not run" for name in wanted if name not in ran]
    return faults


def _cell(language: str, name: str, told: Iterable[Result]) -> str:
    passed = [result.passed for result in told if result.scenario == name]
    if not passed:
        return "-" if name in NOT_OFFERED.get(language, ()) else ""
    return "ok" if all(passed) else "FAIL"
