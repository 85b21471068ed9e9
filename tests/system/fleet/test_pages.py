"""Pages that show workers behind a gateway: what they start is started, and what they ask is answered."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.fleet.gateway import PACKAGES, GatewayProcess, missing_packages
from bench.fleet.process import ChildProcess
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.pages import Block, blocks_of
from tests.fixtures.pages.desk import Desk
from tests.fixtures.pages.marks import PAGES
from tests.fixtures.pages.servers import ShownServer, models_named, starts_a_server
from tests.system.fleet.conftest import is_served, until
from tests.system.mesh.envoy import free_ports
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

SHOWN_PORTS = (50051, 50052, 50061, 50062, 30000)
_WORKER_URL = "grpc://"
MARKED = {page: [block for block in blocks_of(page) if block.mark == "run: gateway"] for page in PAGES}
MARKED = {page: blocks for page, blocks in MARKED.items() if blocks}
TOURS = [
    line
    for blocks in MARKED.values()
    for block in blocks
    for line in block.commands
    if line.startswith("make fleet")
]


class ShownGateway(GatewayProcess):
    """A gateway as a page starts it, but for where its metrics are, which is beyond loopback otherwise."""

    def __init__(self, line: str, *, log: Path) -> None:
        _, _, module, *arguments = shlex.split(line)
        (metrics_port,) = free_ports(1)
        self.port = int(arguments[arguments.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port))
        ChildProcess.__init__(self, module, [*arguments, *metrics], log=log, stop_bound_s=5.0)


class Tour:
    """What a page's blocks start and ask, until `with` is left."""

    def __init__(self, desk: Desk, model: Path) -> None:
        self._desk = desk
        self._model = model
        self._ports = dict(zip(SHOWN_PORTS, free_ports(len(SHOWN_PORTS)), strict=True))
        self._servers: list[ShownServer] = []
        self._stack = contextlib.ExitStack()
        self.answers: list[str] = []

    def __enter__(self) -> Tour:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._stack.close()

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        if block.language == "python":
            self.answers.append(self._desk.run([sys.executable, "-c", self._here(block.text)], {}))
            return
        if block.language == "toml":
            self._put_settings(block.text)
            return
        for line in block.commands:
            if starts_a_server(line):
                self._start_worker(line)
            elif " smg launch " in line:
                gateway = ShownGateway(self._here(line), log=self._desk.folder / "gateway.log")
                self._stack.enter_context(gateway)
                # Asked to end, it takes seconds.
                self._stack.callback(gateway.kill)
                gateway.wait_until_healthy(line.count(_WORKER_URL))
            elif not line.startswith("make fleet"):
                answer = json.loads(self._desk.shell(self._here(line), {}))
                self.answers.append(answer["choices"][0]["message"]["content"])

    def stop_workers(self) -> None:
        """Stop them in order; each must end with 0."""
        for server in self._servers:
            server.stop()

    def _put_settings(self, text: str) -> None:
        """Have a file of settings, which its first line names, and the models that it names."""
        name, *_ = text.removeprefix("# ").splitlines()
        (self._desk.folder / name).write_text(self._here(text), encoding="utf-8")
        models = tomllib.loads(text)["models"]
        # Not the same weights twice, which no server serves.
        for model, kind in zip(models, ("llama", "qwen3"), strict=True):
            tiny = tiny_model_dir(self._desk.folder / "tiny", kind, name=model["model_name"])
            self._desk.put_model(model["model"], tiny)

    def _start_worker(self, line: str) -> None:
        self._desk.put_model(models_named(line), self._model)
        shown = re.search(r"--port (\d+)", line)
        port = self._ports[int(shown[1]) if shown else SHOWN_PORTS[0]]
        server = self._stack.enter_context(ShownServer([line], self._desk, port=port))
        server.wait_until_serving()
        self._servers.append(server)

    def _here(self, text: str) -> str:
        for shown, port in self._ports.items():
            text = re.sub(rf"\b{shown}\b", str(port), text)
        return text


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    if missing := missing_packages((*PACKAGES, "openai")):
        pytest.skip(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    return Desk(tmp_path / "desk")


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_of_gateways_runs(page: Path, desk: Desk, tmp_path: Path) -> None:
    with Tour(desk, tiny_model_dir(tmp_path, "llama")) as tour:
        for block in MARKED[page]:
            tour.follow(block)
        tour.stop_workers()
    assert tour.answers and all(answer.strip() for answer in tour.answers)


@pytest.mark.parametrize("line", TOURS)
def test_the_tour_runs_by_the_line_of_its_page(line: str, desk: Desk, tmp_path: Path) -> None:
    desk.put_model("demo", tiny_model_dir(tmp_path, "llama"))
    tour = subprocess.Popen(
        ["bash", "-c", line],
        cwd=desk.folder,
        env=desk.environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with tour:
        assert tour.stdout is not None
        shown = ""
        for told in tour.stdout:
            shown += told
            if "serving until Ctrl-C" in told:
                # To all that the terminal runs, make and the tour, as Ctrl-C is.
                os.killpg(tour.pid, signal.SIGINT)
    stays = "--stay" in line
    assert ("serving until Ctrl-C" in shown) == stays and "gateway and workers" in shown, shown
    assert (tour.returncode != 0) == stays, shown
    ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", shown)}
    assert len(ports) == 3
    until(lambda: not any(map(is_served, ports)))
