"""Artifacts of a release, language by language, built from a clean copy of the tracked files.

The copy has the licence in each package's folder, and where the project is at home is written into it: the
tree itself names no address, and links in its READMEs lead to files beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from release.readmes import stand_alone

ROOT = Path(__file__).resolve().parents[1]

PYTHON_FOLDERS = ("gen/python", "clients/python", "clients/http", ".")
"""What each distribution is built from: messages, client, HTTP front, server."""

CLIENTS = ("python", "http", "go", "node", "java")

READMES = ("README.md", "gen/python/README.md", *(f"clients/{each}/README.md" for each in CLIENTS))
"""Those that packages have in them."""

GO_MODULES = {"icehouse.dev/api": "gen/go", "icehouse.dev/icehouse": "clients/go"}
JAVA_FOLDER = PurePosixPath("dev/icehouse/icehouse-client")
"""Where a repository of Maven's has the client: its group and its name."""

_TIMEOUT_S = 900
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"


class BuildError(Exception):
    """An artifact that cannot be built, with what its tool says."""


def copy_tree(tree: Path, *, project_url: str | None, pages_url: str | None = None) -> None:
    """Copy what git tracks to `tree`, with the licence and the project's address in each package.

    READMEs that go into packages lose their relative links (`release.readmes`).
    """
    tracked = run(["git", "ls-files", "-z"], folder=ROOT).split("\0")
    for name in filter(None, tracked):
        source, target = ROOT / name, tree / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    for folder in (*PYTHON_FOLDERS[:-1], "clients/node", *GO_MODULES.values()):
        shutil.copy2(ROOT / "LICENSE", tree / folder)
    for readme in READMES:
        text = (tree / readme).read_text(encoding="utf-8")
        folder = readme.rpartition("/")[0]
        alone = stand_alone(text, folder, project_url=project_url, pages_url=pages_url)
        (tree / readme).write_text(alone, encoding="utf-8")
    if project_url is not None:
        _name_home(tree, project_url)


def _name_home(tree: Path, url: str) -> None:
    for folder in PYTHON_FOLDERS:
        _replace(
            tree / folder / "pyproject.toml", r"(?=^\[tool\.)", f'[project.urls]\nHomepage = "{url}"\n\n'
        )
    _replace(tree / "clients/node/package.json", r'(?=^  "license")', f'  "homepage": "{url}",\n')
    scm = f"  <scm>\n    <connection>scm:git:{url}</connection>\n    <url>{url}</url>\n  </scm>\n"
    _replace(tree / "clients/java/pom.xml", r"(?=^  <licenses>)", f"  <url>{url}</url>\n{scm}")


def _replace(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, lambda _: text, path.read_text("utf-8"), count=1, flags=re.MULTILINE)
    if count != 1:
        raise BuildError(f"{path.name} has no place for {text.split()[0]}")
    path.write_text(changed, encoding="utf-8")


def build_python(tree: Path, out: Path, scratch: Path) -> list[Path]:
    """Build each distribution's sdist, and its wheel from that; return the wheels, the server's last."""
    out.mkdir(parents=True)
    wheels = []
    for folder in PYTHON_FOLDERS:
        name = _build("build_sdist", tree / folder, out)
        unpacked = scratch / "sdists"
        with tarfile.open(out / name) as archive:
            archive.extractall(unpacked, filter="data")
        wheel = out / _build("build_wheel", unpacked / name.removesuffix(".tar.gz"), out)
        with zipfile.ZipFile(wheel) as built:
            if not any(n.endswith(".dist-info/licenses/LICENSE") for n in built.namelist()):
                raise BuildError(f"{wheel.name} has no licence in it")
        wheels.append(wheel)
    return wheels


def _build(hook: str, folder: Path, out: Path) -> str:
    """Have setuptools build there, without an environment of its own; return the file's name."""
    return run([sys.executable, "-c", _BUILD.format(hook=hook), str(out)], folder=folder).split()[-1]


def build_node(tree: Path, out: Path) -> None:
    """Compile and pack the TypeScript client, with the packages of its lock file."""
    out.mkdir(parents=True)
    folder = tree / "clients/node"
    run(["npm", "ci", "--no-audit", "--no-fund"], folder=folder)
    run(["npm", "pack", "--pack-destination", str(out)], folder=folder)


def build_go(tree: Path, out: Path, scratch: Path, *, version: str) -> None:
    """Write both modules as a module proxy has them, and have Go read them from there."""
    time = run(["git", "log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"], folder=ROOT)
    for module, folder in GO_MODULES.items():
        write_module(out, tree / folder, module=module, version=f"v{version}", time=time.strip())
    cache = {"GOPROXY": f"file://{out.resolve()}", "GOSUMDB": "off", "GOFLAGS": "-modcacherw"}
    cache["GOMODCACHE"] = str(scratch / "modules")
    for module in GO_MODULES:
        run(["go", "mod", "download", f"{module}@v{version}"], folder=scratch, environment=cache)


def write_module(out: Path, source: Path, *, module: str, version: str, time: str) -> None:
    """Write a module's `.info`, `.mod` and `.zip` and the list of its versions (go.dev/ref/mod)."""
    folder = out / module / "@v"
    folder.mkdir(parents=True)
    (folder / "list").write_text(f"{version}\n", encoding="utf-8")
    info = json.dumps({"Version": version, "Time": time})
    (folder / f"{version}.info").write_text(info, encoding="utf-8")
    shutil.copyfile(source / "go.mod", folder / f"{version}.mod")
    with zipfile.ZipFile(folder / f"{version}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            # Neither time nor owner, so that the same files are the same bytes.
            entry = zipfile.ZipInfo(f"{module}@{version}/{path.relative_to(source).as_posix()}")
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


def build_java(tree: Path, out: Path, *, version: str) -> None:
    """Build the jar, its sources and its API pages, and write them as a repository of Maven's has them."""
    folder = tree / "clients/java"
    command = ["mvn", "--quiet", "--batch-mode", "--no-transfer-progress", "-DskipTests", "-Prelease"]
    run([*command, "package"], folder=folder)
    write_maven(out, folder, version=version)


def write_maven(out: Path, folder: Path, *, version: str) -> None:
    """Write the built jars and the pom, each with the sums that Maven and its central repository ask for."""
    place = out / JAVA_FOLDER / version
    place.mkdir(parents=True)
    stem = f"{JAVA_FOLDER.name}-{version}"
    shutil.copy2(folder / "pom.xml", place / f"{stem}.pom")
    for suffix in (".jar", "-sources.jar", "-javadoc.jar"):
        shutil.copy2(folder / "target" / f"{stem}{suffix}", place)
    for path in sorted(place.iterdir()):
        for name in ("md5", "sha1"):
            digest = hashlib.new(name, path.read_bytes(), usedforsecurity=False).hexdigest()
            path.with_name(f"{path.name}.{name}").write_text(digest, encoding="ascii")


def run(command: Sequence[str], *, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Return what a tool prints; raises BuildError when it is not here or fails."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TZ": "UTC"} | (environment or {})
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise BuildError(f"there is no {command[0]} here; --without leaves a language out") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(f"`{' '.join(command[:6])}` ended with {done.returncode}: {said}")
    return done.stdout
