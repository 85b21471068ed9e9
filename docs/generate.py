"""Write docs/errors.md, or with --check say whether it is what the code says."""

from __future__ import annotations

import sys
from pathlib import Path

from service.rpc.reason_table import markdown

PAGE = Path(__file__).resolve().parent / "errors.md"


def main() -> int:
    """Run; the exit code says whether the page was fresh, when asked."""
    wanted = markdown()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print("docs/errors.md is stale; run make gen", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
