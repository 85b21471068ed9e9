"""Tables of settings and of supported architectures, for docs/settings.md and docs/models.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from icehouse_server.cli.flags import value_text
from icehouse_server.config import SETTINGS
from icehouse_server.text.replies.families import FAMILIES

_WAYS = Path(__file__).resolve().parents[1] / "tests/unit/engine/runner/forward/splits.json"
"""What the contract test of mlx-lm's architectures says of each."""

_WAY_NAMES: Mapping[str, str] = {
    "attention": "All rows in one pass, split at the attention",
    "attention+module": "All rows in one pass, some layers split at their module",
    "module": "All rows in one pass, split at the module that takes the cache",
    "alone": "Each sequence a pass of its own",
    "not_built": "Not tried here",
}


def reply_families() -> str:
    """Return the families of models by the notation of their calls."""
    lines = [
        "| `calls` | models | a call of `f` begins with | strict arguments | tried with the template of |",
        "|---|---|---|---|---|",
    ]
    for family in sorted(FAMILIES, key=lambda family: family.name):
        begin, strict = _code(family.call_start.strip()), "yes" if family.is_strict else "no"
        tested_with = family.tested_with or "our own"
        lines.append(f"| `{family.name}` | {family.models} | {begin} | {strict} | {tested_with} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    shown = text.replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def settings() -> str:
    """Return a table for each section of the settings."""
    lines = []
    for section, group in groupby(SETTINGS, key=lambda setting: setting.section):
        lines += [
            f"## {section}",
            "",
            "| key | flag | variable | default | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| `{s.key}` | `{s.flag}` | `{s.variable}` | {value_text(s, s.default)} | {s.help} |"
            for s in group
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def architectures() -> str:
    """Return the architectures of mlx-lm by how their sequences are served together."""
    table: Mapping[str, Mapping[str, object]] = json.loads(_WAYS.read_text(encoding="utf-8"))
    lines = ["| how sequences share a pass | `model_type` of config.json |", "|---|---|"]
    for way, told in _WAY_NAMES.items():
        names = sorted(name for name, facts in table.items() if facts.get("ways", "not_built") == way)
        lines.append(f"| {told} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    assert sum(line.count("`") for line in lines[2:]) == 2 * len(table), "an architecture has no way of these"
    return "\n".join(lines)
