"""Write what docs/ takes from the code, or with --check say whether it is there as it should be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs import api_reference, capacity, method_table, reasons, tables

DOCS = Path(__file__).resolve().parent


def _with_tables(page: Path, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with each table between its two marks made anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in makers.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(f"{begin}\n{make()}\n{end}", text)
        assert count == 1, f"{page.name} has {count} places for the table {name!r}"
    return text


TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "agents.md": {"programs": tables.agent_programs},
    "howto/group.md": {"group": capacity.group_table},
    "howto/several-models.md": {"together": capacity.together_table},
    "howto/tools.md": {"families": tables.reply_families},
    "capacity.md": {"kv": capacity.kv_table, "wear": capacity.wear_table},
    "models.md": {"architectures": tables.architectures},
    "settings.md": {"settings": tables.settings},
    "sizes.md": {"macs": capacity.mac_table},
}
"""What is made of pages whose rest is written by hand."""


def pages() -> dict[Path, str]:
    """Return every page that is made here, wholly or in part, as it should be."""
    return {
        DOCS / "errors.md": reasons.markdown(),
        DOCS / "methods.md": method_table.markdown(),
        **{DOCS / name: _with_tables(DOCS / name, makers) for name, makers in TABLES.items()},
        **{DOCS / "api" / name: text for name, text in api_reference.pages().items()},
    }


def main() -> int:
    """Run; the exit code says whether the pages were fresh, when asked."""
    made = pages()
    stale = {
        page: text for page, text in made.items() if not page.is_file() or page.read_text("utf-8") != text
    }
    left_over = sorted(set((DOCS / "api").glob("*.md")) - made.keys())
    if "--check" not in sys.argv[1:]:
        for page, text in stale.items():
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        for page in left_over:
            page.unlink()
        return 0
    for page in [*stale, *left_over]:
        print(f"{page.relative_to(DOCS.parent)} is stale; run make gen", file=sys.stderr)
    return 1 if stale or left_over else 0


if __name__ == "__main__":
    sys.exit(main())
