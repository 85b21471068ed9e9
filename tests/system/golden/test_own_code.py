"""The number of our own code is raised when KV or blocks come out otherwise: nobody forgets to decide.

Blocks outlive a release of this server unless `kv_code.OWN_VERSION` says that its code computes something
else. `own_code.json` holds that number and what these files were when somebody last decided; comments,
docstrings and layout are no part of it. When a test fails, decide: does the change make KV, or what a block
holds, come out otherwise by more than rounding, be it that a fault was mended? Then raise the number. In
either case write the record anew:

    PYTHONPATH=.:service:gen/python .venv/bin/python -m tests.system.golden.test_own_code
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import icehouse_server
import pytest
from icehouse_server.engine.runner.identity.kv_code import OWN_VERSION

SERVER = Path(icehouse_server.__file__).parent
RECORD = Path(__file__).with_name("own_code.json")
COMPUTING = (
    "engine/kv_cache/*.py",
    "engine/runner/forward/**/*.py",
    "engine/runner/mlx_lm.py",
    "engine/runner/model_loader.py",
    "engine/runner/vision/*.py",
)
"""What computes KV, or cuts blocks from it and rebuilds caches of them."""


def digest(source: str) -> str:
    """Return the digest of what a module does."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # A string that stands alone documents what is above it.
            kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def found() -> dict[str, Any]:
    paths = sorted({path for pattern in COMPUTING for path in SERVER.glob(pattern)})
    return {
        "version": OWN_VERSION,
        "modules": {str(path.relative_to(SERVER)): digest(path.read_text()) for path in paths},
    }


def test_the_record_is_of_this_number_and_of_these_files() -> None:
    recorded, now = json.loads(RECORD.read_text()), found()
    assert recorded["version"] == now["version"], "write the record anew, as this file says"
    assert recorded["modules"].keys() == now["modules"].keys(), "decide, then write the record anew"


@pytest.mark.parametrize("name", sorted(found()["modules"]))
def test_somebody_decided_about_every_change(name: str) -> None:
    recorded = json.loads(RECORD.read_text())["modules"].get(name)
    assert recorded == found()["modules"][name], (
        f"{name} changed: decide whether OWN_VERSION is raised, then write the record anew, as "
        f"{Path(__file__).name} says"
    )


def test_what_a_module_says_of_itself_is_no_change() -> None:
    one = digest('"""Says."""\n\ndef f(a):\n    """Says."""\n    return a  # why\n\nA = 1\n"""Says."""\n')
    assert one == digest("def f(a):\n    return a\nA = 1\n")
    assert one != digest("def f(a):\n    return -a\nA = 1\n")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")
