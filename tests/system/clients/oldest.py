"""Environment of the oldest libraries that the Python client says it runs with, made once with pip.

Usage: python oldest.py FOLDER. Each floor in the pyproject.toml of what callers install is a pin there, so
that a floor is what was tried. What the tests themselves need comes in the versions of this environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = ("gen/python", "clients/python")
TOOLS = ("pydantic", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")


def floors() -> dict[str, str]:
    """Return the oldest version of each foreign library that the distributions name; they must agree."""
    found: dict[str, str] = {}
    for folder in PROJECTS:
        table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
        for requirement in table["project"]["dependencies"]:
            name, oldest = re.fullmatch(r"([\w-]+)(?:>=|==)([\d.]+)(?:,<\d+)?", requirement).groups()
            if not name.startswith("icehouse"):
                assert found.setdefault(name, oldest) == oldest, name
    return found


def main() -> None:
    """Make the environment unless it is there as it should be; pip's failure is the exit message."""
    folder = Path(sys.argv[1])
    pins = floors() | {name: importlib.metadata.version(name) for name in TOOLS}
    stamp = folder / "pins.json"
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == pins:
        return
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*command, *(f"{name}=={version}" for name, version in pins.items())], check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    stamp.write_text(json.dumps(pins), encoding="utf-8")


if __name__ == "__main__":
    main()
