"""Bills of materials of a release: CycloneDX JSON of the server at run time and of each client.

Each language's own tool makes its bill: cyclonedx-py, npm, cyclonedx-gomod, cyclonedx-maven-plugin. Python's
is of the environment that `make env` made as constraints.txt has it, without what only developers need. What
differs from run to run (time, serial number) is taken out, and a bill that names a folder of this machine,
has no components or is not valid CycloneDX is refused.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from release.version import current

GO_TOOLS = Path(__file__).with_name("tools")
"""A Go module that pins cyclonedx-gomod, with the sums of all it is made of."""

MAVEN_GOAL = "org.cyclonedx:cyclonedx-maven-plugin:2.9.1:makeBom"
_TIMEOUT_S = 600

_VALIDATE = """
import sys
from pathlib import Path
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for path in sys.argv[1:]:
    text = Path(path).read_text(encoding="utf-8")
    version = SchemaVersion.from_version(__import__("json").loads(text)["specVersion"])
    error = JsonStrictValidator(version).validate_str(text)
    if error is not None:
        sys.exit(f"{path}: {error}")
"""


class SbomError(Exception):
    """A bill that cannot be made, or is not what it should be."""


def python_bill(bill: Path, wheels: Sequence[Path], *, project: Path, tools: Path, scratch: Path) -> None:
    """Write the bill of the first wheel and of what it needs; `tools` is the Python that has cyclonedx-py.

    `project` is the pyproject.toml that names what the bill is of.
    """
    python = runtime_environment(scratch / "environment", wheels)
    command = [str(tools), "-m", "cyclonedx_py", "environment", str(python)]
    command += ["--pyproject", str(project), "--mc-type", "application"]
    _run([*command, "--output-reproducible", "--of", "JSON", "-o", str(bill)], folder=scratch)


def npm_bill(bill: Path, folder: Path) -> None:
    """Write the bill of what the lock file has for users."""
    command = ["npm", "sbom", "--package-lock-only", "--omit=dev", "--sbom-format=cyclonedx"]
    package = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        # npm calls the package by its folder's name.
        named = Path(temporary) / package["name"]
        named.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(folder / name, named / name)
        text = _run([*command, "--sbom-type=library"], folder=named)
    bill.write_text(text, encoding="utf-8")


def go_bill(bill: Path, folder: Path) -> None:
    """Write the bill of a Go module."""
    tool = _run(["go", "tool", "-n", "cyclonedx-gomod"], folder=GO_TOOLS).strip()
    _run([tool, "mod", "-json", "-type=library", "-output", str(bill), "."], folder=folder)
    made = json.loads(bill.read_text(encoding="utf-8"))
    bill.write_text(json.dumps(with_our_version(made, f"v{current()}")), encoding="utf-8")


def with_our_version(bill: dict[str, Any], version: str) -> dict[str, Any]:
    """Return a Go module's bill in which our modules have a version: outside of git the tool knows none."""
    for component in (bill["metadata"]["component"], *bill["components"]):
        if component["name"].startswith("icehouse.dev/"):
            component["version"] = version
            name, _, qualifiers = component["purl"].partition("?")
            component["purl"] = f"{name.partition('@')[0]}@{version}?{qualifiers}"
    return bill


def maven_bill(bill: Path, folder: Path) -> None:
    """Write the bill of what a Maven project needs, its tests left out."""
    options = ["-DoutputFormat=json", f"-DoutputDirectory={bill.parent}", f"-DoutputName={bill.stem}"]
    options += ["-DincludeTestScope=false", "-DprojectType=library"]
    _run(["mvn", "--quiet", "--batch-mode", MAVEN_GOAL, *options], folder=folder)


def finish(bills: Iterable[Path], *, tools: Path, private: Iterable[Path]) -> None:
    """Make bills the same for the same input, and refuse what nobody should get."""
    bills, private = tuple(bills), tuple(private)
    for bill in bills:
        text = normalized(json.loads(bill.read_text(encoding="utf-8")))
        if named := [str(folder) for folder in private if str(folder) in text]:
            raise SbomError(f"{bill.name} names {', '.join(named)}, a folder of this machine")
        bill.write_text(text, encoding="utf-8")
    _run([str(tools), "-c", _VALIDATE, *map(str, bills)], folder=Path.cwd())


def normalized(bill: dict[str, Any]) -> str:
    """Return a bill's text without what differs from run to run; raises SbomError for one of nothing."""
    if bill.get("bomFormat") != "CycloneDX" or not bill.get("components"):
        raise SbomError(f"a bill of materials has {len(bill.get('components', ()))} components")
    bill.pop("serialNumber", None)
    bill.get("metadata", {}).pop("timestamp", None)
    return json.dumps(bill, indent=2, ensure_ascii=False) + "\n"


def runtime_environment(folder: Path, wheels: Sequence[Path]) -> Path:
    """Make an environment with the metadata of our wheels and what the first one needs; return its Python.

    Only metadata: that of other distributions is linked to from the environment that runs this.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" in name]
            archive.extractall(site, names)
        ours[_normal(wheel.name.partition("-")[0])] = site / names[0].partition("/")[0]
    first = next(iter(ours))
    for name, place in needed(first, ours).items():
        if name not in ours:
            (site / place.name).symlink_to(place)
    return folder / "bin" / "python"


def needed(first: str, ours: dict[str, Path]) -> dict[str, Path]:
    """Return the metadata folders of a distribution and of all it needs here, extras that are asked for too.

    `ours` are those that are not installed, by name. Raises SbomError for one that is nowhere.
    """
    found: dict[str, Path] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(first, frozenset())]
    seen = set()
    while waiting:
        name, extras = asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        distribution = _distribution(name, ours)
        found[name] = Path(str(distribution._path))  # type: ignore[attr-defined]
        for text in distribution.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append((_normal(requirement.name), frozenset(requirement.extras)))
    return found


def _distribution(name: str, ours: dict[str, Path]) -> importlib.metadata.Distribution:
    if name in ours:
        return importlib.metadata.Distribution.at(ours[name])
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise SbomError(f"{name} is needed and is not in the environment of {sys.executable}") from error


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: Sequence[str], *, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise SbomError(f"`{' '.join(command[:6])} …` ended with {done.returncode}: {said}")
    return done.stdout
