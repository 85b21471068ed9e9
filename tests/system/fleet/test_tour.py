"""`make fleet` as a user runs it, on a tiny model: to its end, and stopped by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fleet.gateway import missing_packages
from bench.server_process import ROOT, child_environment
from tests.fixtures.models import tiny_model_dir
from tests.system.fleet.conftest import is_served, until

# Two workers, one of them twice, and a gateway: each takes seconds to start, more on a busy machine.
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture
def tour(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    if missing := missing_packages():
        pytest.skip(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    model = tiny_model_dir(tmp_path, "llama")
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.fleet.tour", "--model", str(model), "--block-tokens", "16"],
        cwd=ROOT,
        env=child_environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        yield process
        process.terminate()


def served_ports(shown: str) -> list[int]:
    """Return which of the ports of gateway and workers anybody still listens on."""
    ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", shown)}
    assert len(ports) == 3
    return [port for port in ports if is_served(port)]


def test_a_killed_worker_is_done_without_and_comes_back_warm(tour: subprocess.Popen[str]) -> None:
    shown, _ = tour.communicate()
    assert tour.returncode == 0, shown
    assert re.search(r"Worker (\w) was killed .*; conversation \d goes on", shown)
    turns = re.findall(
        r"^  (\d), turn (\d): worker (\w), (.*) of ([\d,]+) tokens reused", shown, re.MULTILINE
    )
    assert len(turns) == 8, shown
    (victim,) = re.findall(r"Worker (\w) is back", shown)
    (_, _, other, _, _), (_, _, last, reused, _) = turns[-2:]
    assert other != victim == last
    assert re.search(r"\d+ SSD", reused)
    assert served_ports(shown) == []
    for group in map(int, re.findall(r"process (\d+)", shown)):
        # Each process has a group of its own, which is gone with the last one in it.
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


@pytest.mark.parametrize(("order", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_of_what_is_broken_off(
    tour: subprocess.Popen[str], order: signal.Signals, code: int
) -> None:
    assert tour.stdout is not None
    shown = ""
    while "1, turn 1" not in shown:
        line = tour.stdout.readline()
        assert line, shown
        shown += line
    tour.send_signal(order)
    rest, _ = tour.communicate()
    assert tour.returncode == code, shown + rest
    until(lambda: not served_ports(shown))
