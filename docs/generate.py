"""Write what docs/ takes from the code, or with --check say whether it is there as it should be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from icehouse_server.rpc.calls import methods, reason_table

from docs import capacity

DOCS = Path(__file__).resolve().parent


def _with_tables(page: Path, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with each table between its two marks made anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(f"{begin}\n{make()}\n{end}", text)
        assert count == 1, f"{page.name} has {count} places for the table {name!r}"
    return text


def pages() -> dict[Path, str]:
    """Return every page that is made here, wholly or in part, as it should be."""
    capacity_page = DOCS / "capacity.md"
    tables = {"kv": capacity.kv_table, "wear": capacity.wear_table}
    return {
        DOCS / "errors.md": reason_table.markdown(),
        DOCS / "methods.md": methods.markdown(),
        capacity_page: _with_tables(capacity_page, tables),
    }


def main() -> int:
    """Run; the exit code says whether the pages were fresh, when asked."""
    stale = {
        page: text for page, text in pages().items() if not page.is_file() or page.read_text("utf-8") != text
    }
    if "--check" not in sys.argv[1:]:
        for page, text in stale.items():
            page.write_text(text, encoding="utf-8")
        return 0
    for page in stale:
        print(f"docs/{page.name} is stale; run make gen", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
