"""Programs of others, installed from their registries into build/agents/ once for each version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_FOLDER = _ROOT / "build" / "agents"
_PINS = Path(__file__).with_name("programs.toml")
_INSTALL_BOUND_S = 240.0
_RUN_BOUND_S = 300.0
_SHOWN_CHARACTERS = 4000


class Unavailable(Exception):
    """A program that cannot be had here, and why."""


class Program:
    """One program, which keeps what it writes in a home of its own."""

    def __init__(self, name: str, binaries: Path, home: Path) -> None:
        self._name = name
        self._binaries = binaries
        self.home = home

    def run(self, commands: str, *, folder: Path, variables: Mapping[str, str]) -> str:
        """Run a shell's commands, which find the program, in a folder and return what they print.

        Of this process's environment it gets where programs are and nothing else, so no key of anybody's
        and no proxy. Raises AssertionError when it fails or takes longer than its bound.
        """
        environment = {
            "PATH": f"{self._binaries}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "DO_NOT_TRACK": "1",
            **variables,
        }
        try:
            ended = subprocess.run(
                ["bash", "-euc", commands],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_RUN_BOUND_S,
            )
        except subprocess.TimeoutExpired as late:
            said = f"{late.stdout!r} {late.stderr!r}"[-_SHOWN_CHARACTERS:]
            raise AssertionError(f"{self._name} did not end in {_RUN_BOUND_S:.0f} s: {said}") from None
        said = (ended.stdout + ended.stderr)[-_SHOWN_CHARACTERS:]
        assert ended.returncode == 0, f"{self._name} ended with {ended.returncode}: {said}"
        return ended.stdout


def program(name: str, home: Path) -> Program:
    """Return a program, installed if it is not yet; raises Unavailable where it cannot be."""
    pin = tomllib.loads(_PINS.read_text(encoding="utf-8"))[name]
    wanted = pin.get("npm") or pin["pip"]
    folder = _FOLDER / name
    stamp = folder / "installed"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != "\n".join(wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install_npm(folder, wanted) if "npm" in pin else _install_pip(folder, wanted)
        stamp.write_text("\n".join(wanted), encoding="utf-8")
    home.mkdir()
    return Program(name, folder / ("node_modules/.bin" if "npm" in pin else "bin"), home)


def _install_npm(folder: Path, wanted: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("npm, which comes with Node.js, is not here")
    _install([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted])


def _install_pip(folder: Path, wanted: list[str]) -> None:
    _install([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _install([*pip, *wanted])


def _install(command: list[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_BOUND_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:2])} took more than {_INSTALL_BOUND_S:.0f} s") from None
    if ended.returncode:
        raise Unavailable(f"{' '.join(command[:2])} failed: {ended.stderr.strip()[-500:]}")
