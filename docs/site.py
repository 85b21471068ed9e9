"""Site hooks: pages of the repository that lie outside docs/ come along, and links follow them.

On GitHub and on disk a link leads to a file beside it. The site has only pages, so a link to another
page of the repository leads to its copy below `repository/`, and one to a file that is no page is text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
_OUTSIDE = ("*.md", "clients/README.md", "clients/*/README.md", "deploy/**/*.md")
_FENCES = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ to those of the site."""
    for pattern in _OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            name = f"{COPIES}/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead a page's links to where their targets are in the site."""
    place = page.file.src_uri
    names = {file.src_uri for file in files}
    parts = _FENCES.split(markdown)
    return "".join(part if part.startswith("```") else _led(part, place, names) for part in parts)


def _led(text: str, place: str, names: set[str]) -> str:
    def lead(match: re.Match[str]) -> str:
        bang, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(place)), target))
        if not (ROOT / path).exists():
            return match[0]  # For mkdocs to complain about.
        name = _in_site(path)
        if name not in names:
            return words
        return f"{bang}[{words}]({posixpath.relpath(name, posixpath.dirname(place) or '.')}{anchor})"

    return _LINK.sub(lead, text)


def _in_repository(name: str) -> str:
    return name.removeprefix(f"{COPIES}/") if name.startswith(f"{COPIES}/") else f"docs/{name}"


def _in_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"
