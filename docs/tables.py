"""Tables of settings and architectures, and what agent programs are set to, for pages of docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from icehouse_server.cli.flags import value_text
from icehouse_server.config import SETTINGS
from icehouse_server.config.sections import MODEL_SETTINGS
from icehouse_server.text.replies.families import FAMILIES

_WAYS = Path(__file__).resolve().parents[1] / "tests/unit/engine/runner/forward/splits.json"
"""What the contract test of mlx-lm's architectures says of each."""

_PROGRAMS = Path(__file__).resolve().parent / "howto/agent-programs.md"
_SHOWN_PROGRAMS: Mapping[str, str] = {
    "Claude Code": "in the environment",
    "Codex CLI": "in `~/.codex/config.toml`",
    "OpenCode": "in `opencode.json`, in the project's folder or in `~/.config/opencode`",
}
"""Where each is set."""

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
    own = [
        s for s in MODEL_SETTINGS if s.name not in {each.name for each in SETTINGS if each.section == "model"}
    ]
    lines += [
        "## models",
        "",
        "One table `[[models]]` in the file for each of [several models](howto/several-models.md). It has "
        "`model`, any other key of `[model]`, and these:",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{s.name}` | {value_text(s, s.default)} | {s.help} |" for s in own]
    return "\n".join(lines)


def architectures() -> str:
    """Return the architectures of mlx-lm by how their sequences are served together."""
    table: Mapping[str, Mapping[str, object]] = json.loads(_WAYS.read_text(encoding="utf-8"))
    lines = ["| how sequences share a pass | `model_type` of config.json |", "|---|---|"]
    for way, told in _WAY_NAMES.items():
        names = sorted(name for name, facts in table.items() if facts.get("ways", "not_built") == way)
        lines.append(f"| {told} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    assert sum(line.count("`") for line in lines[2:]) == 2 * len(table), "an architecture has no way of these"
    return "\n".join(lines)


def agent_programs() -> str:
    """Return the settings of the agent programs that most people use, as their own page has them."""
    page = _PROGRAMS.read_text(encoding="utf-8")
    shown = [""]
    for program, place in _SHOWN_PROGRAMS.items():
        found = re.search(rf"^## {program}$.*?^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert found is not None, f"{_PROGRAMS.name} has no settings of {program}"
        language, lines = found[1], found[2].splitlines()
        if language == "sh":
            # Of the commands, those that set something; the page runs them all.
            language, lines = "bash", [line for line in lines if line.startswith("export ")]
        shown += [f"{program}, {place}:", "", f"```{language}", *lines, "```", ""]
    return "\n".join(shown)
