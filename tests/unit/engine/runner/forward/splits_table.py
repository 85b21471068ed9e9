"""Table of the ways in which passes serve mlx-lm's architectures, in `splits.json` beside this.

`python -m tests.unit.engine.runner.forward.splits_table` writes it anew: read the difference before
committing it, since each line is how fast a model is served.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, Final

from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.small_models import SCHEDULE, architectures, small_model

FILE: Final = Path(__file__).with_name("splits.json")


def read() -> dict[str, dict[str, Any]]:
    """Return the committed table."""
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


def entry_of(architecture: str) -> dict[str, Any]:
    """Return an architecture's line: the ways and what else differs between models, or why there is none."""
    try:
        model = small_model(architecture)
        facts = examine(model, schedule=SCHEDULE)
    except Exception as error:  # whatever a model makes of a small configuration
        return {"not_built": f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"}
    found: dict[str, Any] = {"ways": "+".join(mode.value for mode in facts.modes)}
    for name in ("hidden_size", "can_take_back"):
        if not getattr(facts, name):
            found[name] = False
    if not facts.layer_count:
        found["layers_together"] = True
    if facts.reason:
        found["reason"] = facts.reason[:160]
    return found


def main() -> None:
    """Write the table."""
    with contextlib.redirect_stdout(io.StringIO()):
        names = architectures()
    table = {name: entry_of(name) for name in names}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
