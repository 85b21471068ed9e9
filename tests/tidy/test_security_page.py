"""SECURITY.md points at tests that are there, and has one for each threat that code stands against."""

from __future__ import annotations

import re

from tests.tidy.tree import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def threats() -> list[list[str]]:
    """Return the rows of the table of threats, cell by cell."""
    table = PAGE.partition("## Threats")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_every_proof_is_there() -> None:
    paths = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_threat_has_its_proof() -> None:
    rows = threats()
    assert len(rows) > 10
    assert [row[0] for row in rows if len(row) != 3 or not row[2]] == []
