"""Test the clients of other languages: their own suites, then the example of each README.

Usage: python -m tests.system.clients.languages [LANGUAGE ...]. Real servers run beside them. A language whose
tool chain or packages cannot be had is passed over with a line that says so; what can be tested must pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.system.clients.live_servers import Servers, live_servers

ROOT = Path(__file__).resolve().parents[3]
README_ADDRESS = "localhost:50051"
STEP_TIMEOUT_S = 420


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """How one client is tested, in its folder below clients/."""

    folder: str
    tools: tuple[str, ...]
    """Programs that must be here."""
    fetch: tuple[str, ...]
    """Command that brings the packages."""
    steps: tuple[tuple[str, ...], ...]
    """Commands that build the client and run its tests."""
    fence: str
    """What the README's example is marked with."""
    example: str
    """Where the example is put for a moment, below the folder."""
    run: tuple[str, ...]
    """Command that runs it."""


MAVEN = ("mvn", "--quiet", "--batch-mode", "--no-transfer-progress")

LANGUAGES = (
    Language(
        folder="go",
        tools=("go",),
        fetch=("go", "mod", "download"),
        steps=(
            ("sh", "-c", 'gofmt -d . && test -z "$(gofmt -l .)"'),
            ("go", "vet", "./..."),
            ("go", "test", "-count=1", "./..."),
        ),
        fence="go",
        example="readme_example/main.go",
        run=("go", "run", "./readme_example"),
    ),
    Language(
        folder="node",
        tools=("node", "npm"),
        fetch=("npm", "ci", "--no-audit", "--no-fund"),
        steps=(("npm", "test"),),
        fence="ts",
        example="readme_example/main.ts",
        run=("npm", "run", "example"),
    ),
    Language(
        folder="java",
        tools=("java", "mvn"),
        fetch=(*MAVEN, "dependency:go-offline"),
        steps=(
            (*MAVEN, "verify"),
            (*MAVEN, "dependency:build-classpath", "-Dmdep.outputFile=target/classpath"),
        ),
        fence="java",
        example="readme_example/Example.java",
        run=("sh", "-c", 'java -cp "target/classes:$(cat target/classpath)" readme_example/Example.java'),
    ),
)


def obstacle_of(language: Language) -> str | None:
    """Return why a client cannot be tested on this machine; None where it can be."""
    missing = [tool for tool in language.tools if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here"
    done = answer_of(language.fetch, folder=ROOT / "clients" / language.folder, environment=os.environ)
    if done.returncode != 0:
        return f"`{' '.join(language.fetch)}` brought no packages: {(done.stdout + done.stderr)[-600:]}"
    return None


def tested(language: Language, servers: Servers) -> bool:
    """Build, test and run the example; tell whether all went well."""
    folder = ROOT / "clients" / language.folder
    environment = {**os.environ, "ICEHOUSE_TEST_SERVERS": servers.as_json()}
    for step in language.steps:
        if not succeeded(step, folder=folder, environment=environment):
            return False
    example = folder / language.example
    example.parent.mkdir(exist_ok=True)
    try:
        example.write_text(readme_example(folder, language.fence).replace(README_ADDRESS, servers.address))
        return succeeded(language.run, folder=folder, environment=environment, answer="MODEL_NOT_FOUND")
    finally:
        shutil.rmtree(example.parent)


def readme_example(folder: Path, fence: str) -> str:
    """Return the one block of code with this mark."""
    (block,) = re.findall(
        rf"^```{fence}\n(.*?)^```$", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(block)


def succeeded(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], answer: str = ""
) -> bool:
    """Run a command and show what it says when it fails, or when it does not say `answer`."""
    done = answer_of(command, folder=folder, environment=environment)
    good = done.returncode == 0 and answer in done.stdout
    print(f"  {'ok  ' if good else 'FAIL'} clients/{folder.name}: {' '.join(command)}", flush=True)
    if not good:
        print((done.stdout + done.stderr)[-6000:])
    return good


def answer_of(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a client's folder."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )


def main() -> int:
    """Test what can be tested here; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("languages", nargs="*", help="folders below clients/; all without any")
    wanted = set(parser.parse_args().languages)
    if unknown := wanted - {language.folder for language in LANGUAGES}:
        parser.error(f"there is no such client here: {', '.join(sorted(unknown))}")
    failed = []
    with live_servers() as servers:
        for language in LANGUAGES:
            if wanted and language.folder not in wanted:
                continue
            if obstacle := obstacle_of(language):
                print(f"clients/{language.folder} was not tested: {obstacle}", flush=True)
            elif not tested(language, servers):
                failed.append(language.folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
