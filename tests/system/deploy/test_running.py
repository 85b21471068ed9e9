"""Units, images and pages about running it: they parse, and say only what the program knows."""

from __future__ import annotations

import configparser
import dataclasses
import json
import plistlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from icehouse_server.cli.main import app
from icehouse_server.cli.service.stop_bounds import stop_bound_s
from icehouse_server.config import SETTINGS, Config, TelemetryConfig, load_config
from icehouse_server.config.load import CLIENT_VARIABLES

from docs.generate import pages
from tests.tidy.tree import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "icehouse.service"
PLIST = DEPLOY / "launchd" / "dev.icehouse.serve.plist"
IMAGES = [path for path in sorted((DEPLOY / "docker").iterdir()) if path.suffix != ".dockerignore"]
GATEWAY_OPTIONS = {"--reasoning-parser", "--tool-call-parser", "--balance-abs-threshold", "--model-alias"}
"""Of SMG, as the page on more machines names them."""
TYPERS_OPTIONS = {"--install-completion", "--show-completion", "--help"}
"""Typer's own; the first two only where it can tell the shell."""
BENCH_OPTIONS = {"--quick", "--cases", "--parts", "--clients", "--as-gpu", "--shape", "--minutes"} | {
    *("--rounds", "--state-tokens", "--ssd-mib", "--beside", "--trace", "--requests"),
}
"""Of `make bench` and others, as the page of figures names them."""
HTTP_OPTIONS = {
    "--alias",
    "--strict-models",
    "--exact-prompts",
    "--allow-origin",
    "--name",
    "--max-body-bytes",
    "--body-memory-bytes",
    "--ca-file",
    "--temperature",
}
"""Of icehouse-http, as its page names them."""
RELEASE_OPTIONS = {"--without", "--artifact-url", "--pages-url"}
"""Of `make release`, as the page of releases names them."""
LAUNCH_OPTIONS = {"--backend"}
"""Of mlx.launch, as the page on one model on several machines names it."""
PIP_OPTIONS = {"--no-compile"}
AGENT_OPTIONS = {"--autocompact"}
"""Of agent programs, as their page names them."""
TEXTS = [
    *sorted((DEPLOY / "systemd").iterdir()),
    PLIST,
    *IMAGES,
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "Dockerfile.macos-notes",
]
INSTRUCTIONS = {
    *("FROM", "RUN", "CMD", "EXPOSE", "ENV", "COPY", "ENTRYPOINT", "VOLUME", "USER", "WORKDIR", "STOPSIGNAL")
}


def stop_budget_s() -> float:
    """Return how long an orderly stop may take with the default settings."""
    return stop_bound_s(Config())


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions with their arguments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def assert_starts_the_server(words: list[str]) -> None:
    assert Path(words[0]).name == "icehouse" and words[1] == "serve"
    flags = {setting.flag for setting in SETTINGS} | {"--config"}
    assert {word for word in words if word.startswith("--")} <= flags


def test_the_units_start_the_server() -> None:
    assert_starts_the_server(shlex.split(unit()["Service"]["ExecStart"]))
    assert_starts_the_server(plistlib.loads(PLIST.read_bytes())["ProgramArguments"])
    for image in IMAGES:
        parts = dict(instructions(image))
        assert_starts_the_server([*json.loads(parts["ENTRYPOINT"]), *json.loads(parts["CMD"])])


def test_whoever_stops_it_waits_long_enough() -> None:
    assert int(unit()["Service"]["TimeoutStopSec"]) > stop_budget_s()
    assert plistlib.loads(PLIST.read_bytes())["ExitTimeOut"] > stop_budget_s()
    for path in TEXTS:
        for given in re.findall(r"--stop-timeout (\d+)|GracePeriodSeconds: (\d+)", path.read_text()):
            assert int("".join(given)) > stop_budget_s(), path


def test_the_page_tells_how_long_a_stop_may_take() -> None:
    config, page = Config(), (ROOT / "docs" / "running.md").read_text()
    rest_s = stop_budget_s() - config.server.drain_grace_s - config.cache.flush_timeout_s
    assert f"{rest_s:g} s" in page and f"{stop_budget_s():g} s with the default settings" in page
    traced = dataclasses.replace(config, telemetry=TelemetryConfig(traces_endpoint="http://collector:4317"))
    assert f"{stop_bound_s(traced) - stop_budget_s():g} s more" in page
    for path in (UNIT, ROOT / "Dockerfile.macos-notes"):
        assert f"{rest_s:g} s" in path.read_text(), path


def test_nobody_else_may_read_what_it_writes() -> None:
    service = unit()["Service"]
    assert (service["UMask"], service["CacheDirectoryMode"], service["LimitCORE"]) == ("0077", "0700", "0")
    agent = plistlib.loads(PLIST.read_bytes())
    assert agent["Umask"] == 0o077 and agent["SoftResourceLimits"]["Core"] == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    for path in (DEPLOY / "systemd").glob("*.conf"):
        shutil.copy(path, drop_ins)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    # Of the machine's own units it may say what it likes.
    said = [line for line in done.stderr.splitlines() if "icehouse" in line or str(tmp_path) in line]
    assert said == []


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_here(path: Path) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert [name for name, _ in found].count("FROM") == 1 and found[0][0] == "FROM"
    ignored = (path.parent / f"{path.name}.dockerignore").read_text().splitlines()
    for name, rest in found:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored
    assert dict(found)["USER"] not in ("root", "0")
    extras = re.findall(r"'\.\[([a-z,]+)\]'", path.read_text())[0].split(",")
    table = (ROOT / "pyproject.toml").read_text()
    # What the server needs of ours is in no registry.
    assert re.search(r" gen/python clients/python clients/http '\.\[", path.read_text())
    assert all(re.search(rf"^{extra} = \[", table, re.MULTILINE) for extra in extras)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    variables = {setting.variable for setting in SETTINGS} | {"ICEHOUSE_CONFIG", *CLIENT_VARIABLES}
    assert set(re.findall(r"\bICEHOUSE_[A-Z_]+\b", text)) <= variables
    own = {setting.flag for setting in SETTINGS} | set(_options_of(typer.main.get_command(app)))
    named = set(re.findall(r"`(--[a-z-]+)[ `]", text))
    switches = {f"--no-{flag[2:]}" for flag in own}
    others = GATEWAY_OPTIONS | TYPERS_OPTIONS | BENCH_OPTIONS | RELEASE_OPTIONS | HTTP_OPTIONS
    others |= PIP_OPTIONS | AGENT_OPTIONS | LAUNCH_OPTIONS
    assert named - own - switches - others == set()


def _options_of(command: Any) -> Iterator[str]:
    """Yield the options of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from _options_of(below)


def test_the_images_environment_is_a_configuration() -> None:
    for path in IMAGES:
        (given,) = [rest for name, rest in instructions(path) if name == "ENV" and "ICEHOUSE" in rest]
        environ = dict(word.split("=", 1) for word in given.split() if word.startswith("ICEHOUSE_"))
        assert load_config(environ=environ).config.server.host == "0.0.0.0"


def test_every_page_that_is_named_exists() -> None:
    for path in TEXTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} names {target}"


def test_the_generated_pages_are_fresh() -> None:
    assert [page.name for page, text in pages().items() if page.read_text() != text] == [], "run make gen"
