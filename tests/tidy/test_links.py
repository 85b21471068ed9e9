"""Links in Markdown: each relative one leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, text_files

PAGES = {path: text for path, text in text_files() if path.suffix == ".md"}
_FENCES = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Return the targets of a page's links, code left out."""
    return _LINK.findall(_CODE.sub("", _FENCES.sub("", text)))


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them; none of a heading that comes twice."""
    headings = _HEADING.findall(_FENCES.sub("", PAGES[path]))
    found = Counter(
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        for heading in headings
    )
    return {anchor for anchor, count in found.items() if count == 1}


def dead_links(path: Path, text: str) -> Iterator[str]:
    """Yield what is wrong with each link of a page that leads nowhere."""
    for target in links(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        full = (ROOT / path.parent / file).resolve() if file else ROOT / path
        if not full.is_relative_to(ROOT.resolve()) or not full.exists():
            yield f"{path}: {target}: there is no such file"
        elif anchor and full.suffix == ".md" and anchor not in anchors(full.relative_to(ROOT)):
            yield f"{path}: {target}: the page has no such heading, or has it twice"


def test_every_relative_link_leads_somewhere() -> None:
    assert len(PAGES) > 20
    assert [found for path, text in PAGES.items() for found in dead_links(path, text)] == []


def test_a_dead_link_is_noticed() -> None:
    page = Path("README.md")
    assert len(list(dead_links(page, "[a](docs/none.md) [b](LICENSE) [c](#none) [d](https://x.test/y)"))) == 2
    assert not list(dead_links(page, "`[a](none.md)`\n```sh\n[b](none.md)\n```\n"))


def test_every_page_is_in_the_sites_navigation() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {p.relative_to("docs").as_posix() for p in PAGES if p.parts[0] == "docs"}
    assert named == {name for name in there if not name.startswith("api/")} | {"api/index.md"}
