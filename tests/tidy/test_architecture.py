"""ARCHITECTURE.md stays short and true, and each decision has a page that answers the same questions."""

from __future__ import annotations

import re

from tests.tidy.tree import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9][0-9]-*.md"))
HEADINGS = ["Question", "Choice", "Evidence", "What would change our mind"]
PLACES = ("", "service/icehouse_server/", "tests/")
"""Where a path that is named may begin."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a page: drawings left out, each cell of a table by itself."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    blocks = re.split(r"\n\n|\n(?=[-|]|\d+\. )|\|", prose)
    return [s for block in blocks for s in re.split(r"(?<=[.:;])\s+", " ".join(block.split())) if s]


def missing(text: str) -> list[str]:
    """Return the files that a page names and nobody has."""
    named = re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.\w+)?|\w+\.py)`", text)
    return [path for path in named if not any((ROOT / place / path).exists() for place in PLACES)]


def test_it_is_three_pages() -> None:
    assert len(TEXT.encode()) <= 9000


def test_its_sentences_are_short() -> None:
    assert [s for s in sentences(TEXT) if len(s.split()) > 30] == []


def test_the_files_that_it_and_the_decisions_name_are_there() -> None:
    assert missing("`engine/none.py` and `engine/engine_loop.py`") == ["engine/none.py"]
    pages = [TEXT, *(page.read_text(encoding="utf-8") for page in DECISIONS)]
    assert [path for text in pages for path in missing(text)] == []


def test_every_decision_has_its_number_its_four_parts_and_a_line_in_the_index() -> None:
    assert [page.name[:2] for page in DECISIONS] == [f"{i:02}" for i in range(1, len(DECISIONS) + 1)]
    index = (ROOT / "docs" / "decisions" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    titles = []
    for page in DECISIONS:
        text = page.read_text(encoding="utf-8")
        titles.append((text.partition("\n")[0].removeprefix("# "), page.name))
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, page.name
        assert len(text.splitlines()) <= 40, page.name
    assert listed == titles
