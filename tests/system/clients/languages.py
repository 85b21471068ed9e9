"""Test the clients of all languages: their own suites, the scenarios, then the example of each README.

Usage: python -m tests.system.clients.languages [LANGUAGE ...]. Real servers run beside them. A language whose
tool chain or packages cannot be had is passed over with a line that says so; what can be tested must pass,
and every scenario must have been run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.system.clients import web_page
from tests.system.clients.live_servers import Servers, live_servers
from tests.system.clients.scenarios import (
    NOT_YET,
    RESULTS_VARIABLE,
    Result,
    faults_of,
    read_results,
    scenario_names,
    table_of,
    unserved,
)

ROOT = Path(__file__).resolve().parents[3]
README_ADDRESS = "localhost:50051"
STEP_TIMEOUT_S = 420


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """The one block of code in a README, and how it is run."""

    fence: str
    """What it is marked with."""
    path: str
    """Where it is put for a moment, below the client's folder."""
    run: tuple[str, ...]
    """Command that runs it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """How one client is tested, in its folder below clients/."""

    folder: str
    tools: tuple[str, ...]
    """Programs that must be here."""
    fetch: tuple[str, ...]
    """Command that brings the packages; none where they are here already."""
    steps: tuple[tuple[str, ...], ...]
    """Commands that build the client and run its tests."""
    example: Example | None
    """None where the README has several, which are not run here."""
    has_page: bool = False
    """Whether it is tried in a browser too."""
    variant: str = ""
    """What tells it from another one of its folder."""

    @property
    def name(self) -> str:
        """What the command and the table call it."""
        return f"{self.folder}-{self.variant}" if self.variant else self.folder


OLDEST = ROOT / "build" / "oldest"
"""Environment with the oldest libraries that the Python client runs with."""

MAVEN = ("mvn", "--quiet", "--batch-mode", "--no-transfer-progress")

LANGUAGES = (
    Language(
        folder="python",
        tools=(),
        fetch=(),
        steps=((sys.executable, "-m", "pytest", "-q", "--timeout", "300", "tests"),),
        example=None,
    ),
    Language(
        folder="python",
        variant="oldest",
        tools=(),
        fetch=(sys.executable, str(ROOT / "tests/system/clients/oldest.py"), str(OLDEST)),
        steps=((str(OLDEST / "bin/python"), "-m", "pytest", "-q", "--timeout", "300", "tests"),),
        example=None,
    ),
    Language(
        folder="http",
        tools=(),
        fetch=(),
        steps=((sys.executable, "-m", "pytest", "-q", "--timeout", "300", "scenarios"),),
        example=None,
    ),
    Language(
        folder="go",
        tools=("go",),
        fetch=("go", "mod", "download"),
        steps=(
            ("sh", "-c", 'gofmt -d . && test -z "$(gofmt -l .)"'),
            ("go", "vet", "./..."),
            ("go", "test", "-count=1", "./..."),
        ),
        example=Example("go", "readme_example/main.go", ("go", "run", "./readme_example")),
    ),
    Language(
        folder="node",
        tools=("node", "npm"),
        fetch=("npm", "ci", "--no-audit", "--no-fund"),
        steps=(("npm", "test"),),
        example=Example("ts", "readme_example/main.ts", ("npm", "run", "example")),
        has_page=True,
    ),
    Language(
        folder="java",
        tools=("java", "mvn"),
        fetch=(*MAVEN, "dependency:go-offline"),
        steps=(
            (*MAVEN, "verify"),
            (*MAVEN, "dependency:build-classpath", "-Dmdep.outputFile=target/classpath"),
        ),
        example=Example(
            "java",
            "readme_example/Example.java",
            ("sh", "-c", 'java -cp "target/classes:$(cat target/classpath)" readme_example/Example.java'),
        ),
    ),
)


def obstacle_of(language: Language) -> str | None:
    """Return why a client cannot be tested on this machine; None where it can be."""
    missing = [tool for tool in language.tools if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here"
    if not language.fetch:
        return None
    done = answer_of(language.fetch, folder=ROOT / "clients" / language.folder, environment=os.environ)
    if done.returncode != 0:
        return f"`{' '.join(language.fetch)}` brought no packages: {(done.stdout + done.stderr)[-600:]}"
    return None


def tested(language: Language, servers: Servers, *, results: Path) -> bool:
    """Build, test and run the example; tell whether all went well. Scenarios write to the file `results`."""
    folder = ROOT / "clients" / language.folder
    environment = {
        **os.environ,
        "ICEHOUSE_TEST_SERVERS": servers.as_json(),
        RESULTS_VARIABLE: str(results),
    }
    for step in language.steps:
        if not succeeded(step, folder=folder, environment=environment):
            return False
    if language.has_page and not page_answered(folder, servers):
        return False
    if language.example is None:
        return True
    path = folder / language.example.path
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_text(
            readme_example(folder, language.example.fence).replace(README_ADDRESS, servers.chat_address)
        )
        command = language.example.run
        return succeeded(command, folder=folder, environment=environment, answer="MODEL_NOT_FOUND")
    finally:
        shutil.rmtree(path.parent)


def page_answered(folder: Path, servers: Servers) -> bool:
    """Try the packed client in a browser and say how that went, or why it cannot be tried here."""
    if obstacle := web_page.obstacle_of(servers.web_url):
        print(f"  clients/{folder.name} was not tried in a browser: {obstacle}", flush=True)
        return True
    faults = web_page.faults_of(servers, folder)
    lines = [f"  {'FAIL' if faults else 'ok  '} clients/{folder.name}: its package in a browser", *faults]
    print("\n".join(lines), flush=True)
    return not faults


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
        print(f"{done.stderr[-3000:]}\n{done.stdout[-6000:]}")
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
    parser.add_argument("languages", nargs="*", help="folders below clients/, python-oldest; all without any")
    wanted = set(parser.parse_args().languages)
    if unknown := wanted - {language.name for language in LANGUAGES}:
        parser.error(f"there is no such client here: {', '.join(sorted(unknown))}")
    failed = []
    results: dict[str, Sequence[Result]] = {}
    with live_servers() as servers, tempfile.TemporaryDirectory() as scratch:
        for language in LANGUAGES:
            if wanted and language.name not in wanted:
                continue
            if obstacle := obstacle_of(language):
                print(f"{language.name} was not tested: {obstacle}", flush=True)
                continue
            path = Path(scratch) / f"{language.name}.jsonl"
            if not tested(language, servers, results=path):
                failed.append(language.name)
            results[language.name] = read_results(path)
    left_out = unserved(dataclasses.asdict(servers))
    return 1 if told_of_scenarios(results, left_out=left_out) or failed else 0


def told_of_scenarios(results: Mapping[str, Sequence[Result]], *, left_out: Collection[str]) -> list[str]:
    """Print the table, what could not be run here, and what is wrong; return the latter."""
    names = [name for name in scenario_names() if name not in left_out]
    print(table_of(names, results))
    if left_out:
        print(f"not run: {', '.join(left_out)}: the extra `vision` (mlx-vlm) is not installed here")
    if unfinished := sorted(set(NOT_YET) & set(results)):
        print(f"not yet complete, so that empty cells do not fail: {', '.join(unfinished)}")
    faults = faults_of(names, results)
    print("\n".join(f"FAIL {fault}" for fault in faults), end="\n" if faults else "")
    return faults


if __name__ == "__main__":
    sys.exit(main())
