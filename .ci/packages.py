"""The four distributions, built and installed as users do: `make packages`.

Builds a wheel of each into dist/wheels, proves that no file is in two of them and that what must ship does,
installs them in many orders, each into an environment of its own, and removes them one after the other: what
stays must be whole, by the hashes of its own record, and must still be importable. The commands run from a
folder that has a package `service` of its own. What the distributions depend on is taken from the environment
that runs this, so nothing is downloaded.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "dist" / "wheels"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """One distribution: where it is built, what must be in it, and what shows that it works."""

    name: str
    folder: str
    package: str
    """The only top-level package it may install."""
    files: tuple[str, ...]
    imports: str
    needs: tuple[str, ...] = ()
    """Distributions of ours without which it cannot be imported."""


PROTOS = Distribution(
    name="icehouse-protos",
    folder="gen/python",
    package="icehouse",
    files=("icehouse/py.typed", "icehouse/v1/inference_service_pb2.pyi"),
    imports="icehouse.v1.inference_service_pb2_grpc",
)
CLIENT = Distribution(
    name="icehouse-client",
    folder="clients/python",
    package="icehouse_client",
    files=("icehouse_client/py.typed", "icehouse_client/service_config.json"),
    imports="icehouse_client, icehouse_client.cli.main",
    needs=("icehouse-protos",),
)
HTTP = Distribution(
    name="icehouse-http",
    folder="clients/http",
    package="icehouse_http",
    files=("icehouse_http/py.typed",),
    imports="icehouse_http.command",
    needs=("icehouse-client", "icehouse-protos"),
)
SERVER = Distribution(
    name="icehouse",
    folder=".",
    package="icehouse_server",
    files=(
        "icehouse_server/py.typed",
        "icehouse_server/demo/story.txt",
        "icehouse_server/telemetry/status_page/page.html",
    ),
    imports="icehouse_server.cli.main, icehouse_server.storage.local.tier",
    needs=("icehouse-client", "icehouse-http", "icehouse-protos"),
)
DISTRIBUTIONS = (PROTOS, CLIENT, HTTP, SERVER)
ORDERS = tuple(
    (*way[start:], *way[:start])
    for way in (DISTRIBUTIONS, DISTRIBUTIONS[::-1])
    for start in range(len(DISTRIBUTIONS))
)
"""Each is the first and the last one in some of them, and each two come in both orders."""
_COMMANDS = (("--help",), ("demo", "--help"), ("version",))


class PackagingError(Exception):
    """Something that a user would meet after `pip install`."""


def main() -> None:
    """Build, install, remove; one line per step. Exit code 1 says what is wrong."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="icehouse-packages-") as scratch:
        try:
            _check(Path(scratch))
        except PackagingError as error:
            sys.exit(f"packages: {error}")
    print(f"packages: all well, {time.monotonic() - began:.0f} s")


def _check(scratch: Path) -> None:
    dependencies = _link_dependencies(scratch / "dependencies")
    pip = _pip(scratch / "builder", dependencies)
    wheels = {d.name: _build(d, pip, scratch) for d in DISTRIBUTIONS}
    _keep(wheels.values())
    contents = {d.name: _contents(d, wheels[d.name]) for d in DISTRIBUTIONS}
    for one, other in itertools.combinations(contents, 2):
        if shared := contents[one] & contents[other]:
            raise PackagingError(f"{one} and {other} both have {', '.join(sorted(shared))}")
    print(f"built: {', '.join(f'{name} ({len(files)} files)' for name, files in contents.items())}")
    for index, order in enumerate(ORDERS):
        environment = Environment(scratch / f"environment-{index}", pip, dependencies)
        for distribution in order:
            environment.install(wheels[distribution.name])
        environment.check(order)
        if index == 0:
            environment.run_beside_a_service_folder(scratch / "elsewhere")
        for count, distribution in enumerate(order[:-1], start=1):
            environment.uninstall(distribution)
            environment.check(order[count:])
        print(f"installed and removed: {', '.join(d.name for d in order)}")


class Environment:
    """A fresh virtual environment without pip, which sees the dependencies and nothing of ours."""

    def __init__(self, folder: Path, pip: Sequence[str], dependencies: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self._bin = folder / "bin"
        self._pip = [*pip, "--python", str(self._bin / "python")]
        self._site = _site_of(folder)
        (self._site / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")

    def install(self, wheel: Path) -> None:
        """Install one wheel and nothing that it depends on."""
        _run([*self._pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)])

    def uninstall(self, distribution: Distribution) -> None:
        """Remove one distribution."""
        _run([*self._pip, "uninstall", "--quiet", "--yes", distribution.name])

    def check(self, installed: Iterable[Distribution]) -> None:
        """Prove that what is installed is whole, imports, and is all there is."""
        installed = tuple(installed)
        names = {d.name for d in installed}
        for distribution in DISTRIBUTIONS:
            there = (self._site / distribution.package).exists()
            if there != (distribution.name in names):
                state = "left something behind" if there else "is gone"
                raise PackagingError(f"{distribution.name} {state} with {', '.join(sorted(names))} installed")
        for distribution in installed:
            self._check_record(distribution)
        importable = [d.imports for d in installed if names.issuperset(d.needs)]
        if importable:
            _run([str(self._bin / "python"), "-c", f"import {', '.join(importable)}"])

    def run_beside_a_service_folder(self, folder: Path) -> None:
        """Run the command from a folder whose own package `service` cannot be imported."""
        (folder / "service").mkdir(parents=True)
        (folder / "service" / "__init__.py").write_text(
            "raise ImportError('somebody else\\'s service')\n", encoding="utf-8"
        )
        for arguments in _COMMANDS:
            _run([str(self._bin / "icehouse"), *arguments], cwd=folder)
            _run([str(self._bin / "python"), "-m", "icehouse_server.cli.main", *arguments], cwd=folder)
        for command in ("icehouse-client", "icehouse-http"):
            _run([str(self._bin / command), "--help"], cwd=folder)
        print("the commands run beside a folder `service` with an __init__.py")

    def _check_record(self, distribution: Distribution) -> None:
        stem = distribution.name.replace("-", "_")
        records = list(self._site.glob(f"{stem}-*.dist-info/RECORD"))
        if len(records) != 1:
            raise PackagingError(f"{distribution.name} has {len(records)} records where one should be")
        for line in records[0].read_text(encoding="utf-8").splitlines():
            name, digest, _ = line.rsplit(",", 2)
            if not digest:
                continue
            path = self._site / name
            if not path.exists():
                raise PackagingError(f"{distribution.name} has lost {name}")
            if digest != _digest(path):
                raise PackagingError(f"{distribution.name}: {name} is not the file that was installed")


def _digest(path: Path) -> str:
    """Return a file's hash as a record spells it (PEP 376)."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode('ascii')}"


def _contents(distribution: Distribution, wheel: Path) -> frozenset[str]:
    """Return a wheel's files; raises PackagingError for one that is missing or out of place."""
    with zipfile.ZipFile(wheel) as archive:
        files = frozenset(name for name in archive.namelist() if not name.endswith("/"))
    if missing := set(distribution.files) - files:
        raise PackagingError(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    strange = {top for name in files if not (top := name.partition("/")[0]).endswith(".dist-info")}
    if strange != {distribution.package}:
        raise PackagingError(f"{wheel.name} installs {', '.join(sorted(strange))}")
    return files


def _build(distribution: Distribution, pip: Sequence[str], scratch: Path) -> Path:
    """Build a wheel out of a copy, so that the tree stays as it is."""
    source = scratch / "source" / distribution.name
    folder = ROOT / distribution.folder
    source.mkdir(parents=True)
    for entry in folder.iterdir():
        # The server's own folder is the repository: only what its pyproject.toml speaks of is copied.
        if entry.is_file() and not entry.name.startswith("."):
            shutil.copy2(entry, source)
        elif entry.is_dir() and entry.name in ("service", "src", "icehouse"):
            shutil.copytree(entry, source / entry.name, ignore=_LEFT_OUT)
    wheels = scratch / "wheels" / distribution.name
    _run([*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)])
    (wheel,) = wheels.glob("*.whl")
    return wheel


def _keep(wheels: Iterable[Path]) -> None:
    """Leave the wheels where pages say they are, instead of those of an earlier run."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    for wheel in wheels:
        shutil.copy2(wheel, WHEELS)


def _pip(folder: Path, dependencies: Path) -> list[str]:
    """Return the command of a pip of our own: the environment that runs this may have none."""
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # Python 3.11 brings an old one, which would stand before the one among the dependencies.
    _run([*pip, "uninstall", "--quiet", "--yes", "setuptools"])
    (_site_of(folder) / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    return pip


def _link_dependencies(folder: Path) -> Path:
    """Make a folder with everything that is installed beside this program, but nothing of ours.

    So pip cannot take the editable installs of a developer for the ones it is asked to replace.
    """
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        name = entry.name.lower()
        if not name.startswith(("icehouse", "__editable__", "pip")) and not name.endswith(".pth"):
            (folder / entry.name).symlink_to(entry)
    return folder


def _site_of(folder: Path) -> Path:
    (site,) = folder.glob("lib/python*/site-packages")
    return site


def _run(command: Sequence[str], *, cwd: Path | None = None) -> None:
    environ: Mapping[str, str] = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise PackagingError(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")


if __name__ == "__main__":
    main()
