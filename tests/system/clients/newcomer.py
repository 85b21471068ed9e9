"""A release's packages as somebody new meets them: an empty project each, and nothing but their READMEs.

Usage: python -m tests.system.clients.newcomer RELEASE [LANGUAGE ...], where RELEASE is a folder that `make
release` has made. Installs as the README says, runs its example against real servers, and wants to see a turn
that started from the cache, the end of a tools loop, and a refused call. A language whose tools are not here
is passed over with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fixtures.pages import CLIENT_PAGE, blocks_of, program_of
from tests.system.clients.languages import README_ADDRESS, ROOT, readme_example
from tests.system.clients.live_servers import Servers, live_servers

SHOWN_RELEASE = "/path/to/release"
WANTED = (r"\b[1-9]\d* (of \d+ )?prompt tokens (were cached|came from the cache)", "MODEL_NOT_FOUND")
"""What every example prints when it has come to its end."""
TIMEOUT_S = 900

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>example</groupId>
  <artifactId>example</artifactId>
  <version>1</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source>
    <maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
{shown}</project>
"""
"""A project of Maven's as `archetype:generate` leaves it, but for what the README adds."""


def run(command: list[str] | str, folder: Path, **variables: str) -> str:
    """Run a command, or lines of a shell, and return what it prints; raises CalledProcessError."""
    if isinstance(command, str):
        command = ["sh", "-euc", command]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def python(folder: Path, release: Path, servers: Servers) -> str:
    """Install the wheels and run every block of the page."""
    page = CLIENT_PAGE.read_text(encoding="utf-8")
    [install] = re.findall(r"`(pip install icehouse_protos[^`]+)`", page)
    [extra] = re.findall(r"`(pip install pydantic)`", page)
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    path = f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"
    run(f"{install} && {extra}", release / "python", PATH=path, PYTHONPATH="")
    blocks = [block for block in blocks_of(CLIENT_PAGE) if block.is_run and block.language == "python"]
    program = program_of(blocks, servers.address, calling=servers.chat_address)
    return run(["python", "-W", "error", "-c", program], folder, PATH=path, PYTHONPATH="")


def go(folder: Path, release: Path, servers: Servers) -> str:
    """Fetch the modules from the release's proxy and run the example."""
    get, _ = shell_blocks("go")
    (folder / "main.go").write_text(example("go", "go", servers))
    # Modules that were fetched before would hide what the proxy lacks.
    fresh = {"GOMODCACHE": str(folder / "modules"), "GOFLAGS": "-modcacherw"}
    run(f"go mod init example\n{get.replace(SHOWN_RELEASE, str(release))}", folder, **fresh)
    return run(["go", "run", "."], folder, **fresh)


def node(folder: Path, release: Path, servers: Servers) -> str:
    """Install the tarball, compile the example, and run it."""
    [tarball] = (release / "node").glob("*.tgz")
    shutil.copy(tarball, folder)
    (folder / "main.ts").write_text(example("node", "ts", servers))
    [commands] = shell_blocks("node")
    return run(commands, folder)


def java(folder: Path, release: Path, servers: Servers) -> str:
    """Take the jars from the release's repository and run the example."""
    shown = readme_example(ROOT / "clients" / "java", "xml").replace(SHOWN_RELEASE, str(release))
    (folder / "pom.xml").write_text(POM.format(shown=shown))
    source = folder / "src" / "main" / "java" / "Example.java"
    source.parent.mkdir(parents=True)
    source.write_text(example("java", "java", servers))
    [commands] = shell_blocks("java")
    fresh = f"--batch-mode --no-transfer-progress -Dmaven.repo.local={folder / 'repository'}"
    return run(commands, folder, MAVEN_ARGS=fresh)


def shell_blocks(language: str) -> list[str]:
    """Return the commands that a README shows."""
    page = ROOT / "clients" / language / "README.md"
    return [block.text for block in blocks_of(page) if block.language == "sh"]


def example(language: str, fence: str, servers: Servers) -> str:
    """Return a README's example, which is about a model that asks for tools."""
    text = readme_example(ROOT / "clients" / language, fence)
    return text.replace(README_ADDRESS, servers.chat_address)


LANGUAGES: Mapping[str, tuple[tuple[str, ...], Callable[[Path, Path, Servers], str]]] = {
    "python": ((), python),
    "go": (("go",), go),
    "node": (("node", "npm"), node),
    "java": (("java", "mvn"), java),
}
"""The programs that each needs, and how it is tried."""


def fault_of(name: str, folder: Path, release: Path, servers: Servers) -> str | None:
    """Try a language in an empty folder; return what was wrong."""
    try:
        output = LANGUAGES[name][1](folder, release, servers)
    except subprocess.CalledProcessError as failed:
        return f"{' '.join(failed.cmd)[-300:]}\n{failed.stdout[-2000:]}\n{failed.stderr[-4000:]}"
    missing = [pattern for pattern in WANTED if not re.search(pattern, output)]
    return f"{missing} are not in what it prints:\n{output[-3000:]}" if missing else None


def main() -> int:
    """Try what can be tried here; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", type=Path)
    parser.add_argument("languages", nargs="*", help=f"of {', '.join(LANGUAGES)}; all without any")
    arguments = parser.parse_args()
    if unknown := set(arguments.languages) - set(LANGUAGES):
        parser.error(f"there is no such client: {', '.join(sorted(unknown))}")
    faults = 0
    with live_servers() as servers:
        for name in arguments.languages or LANGUAGES:
            if absent := [tool for tool in LANGUAGES[name][0] if shutil.which(tool) is None]:
                print(f"{name} was not tried: there is no {' and no '.join(absent)} here", flush=True)
                continue
            with tempfile.TemporaryDirectory(prefix="icehouse-newcomer-") as folder:
                fault = fault_of(name, Path(folder), arguments.release.resolve(), servers)
            print(f"FAIL {name}: {fault}" if fault else f"ok   {name}", flush=True)
            faults += fault is not None
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
