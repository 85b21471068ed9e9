"""Wheels for Macs: of the server and what it needs on Apple silicon, in the versions that are pinned here.

uv resolves for a Mac wherever this runs, pip fetches. Both are asked for exact versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from release.artifacts import run
from release.formula import PYTHON, WHEEL_PLATFORM

EXTRAS = "encryption"
"""What encrypted blocks need; a formula has no extras to choose from."""


def fetch(folder: Path, ours: Sequence[Path], *, constraints: Path, tools: Path) -> None:
    """Put everything that our wheels need into the new `folder`; ours are left where they are.

    `tools` is the Python that has pip, and uv beside it. Raises BuildError where one cannot be had for a Mac.
    """
    folder.mkdir(parents=True)
    pins = folder / "pins.txt"
    asked = folder / "asked.txt"
    asked.write_text("".join(f"{_requirement(wheel)}\n" for wheel in ours), encoding="utf-8")
    own = [f"--no-emit-package={wheel.name.partition('-')[0].replace('_', '-')}" for wheel in ours]
    target = ["--python-platform=aarch64-apple-darwin", f"--python-version={PYTHON}"]
    command = [
        str(tools.with_name("uv")),
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        *target,
        *own,
    ]
    environment = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    run(
        [*command, f"--constraints={constraints}", f"--output-file={pins}", str(asked)],
        folder=folder,
        environment=environment,
    )
    command = [str(tools), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--platform={WHEEL_PLATFORM}", f"--python-version={PYTHON}"]
    run([*command, f"--dest={folder}", f"--requirement={pins}"], folder=folder)
    asked.unlink()
    pins.unlink()


def _requirement(wheel: Path) -> str:
    # By its path: whatever an index has under the name is not ours.
    name = wheel.name.partition("-")[0].replace("_", "-")
    extras = f"[{EXTRAS}]" if name == "icehouse" else ""
    return f"{name}{extras} @ {wheel.resolve().as_uri()}"
