"""What a broken-off test run leaves behind: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.fleet.gateway import missing_packages
from tests.system.fleet.conftest import is_served, until

pytestmark = pytest.mark.fleet

_ABANDON = """
import os, pathlib, sys
from tests.system.fleet.conftest import fleet_of

with fleet_of(pathlib.Path(sys.argv[1])) as fleet:
    print(fleet.gateway.port, *fleet.workers, flush=True)
    os._exit(1)
"""


def test_a_run_that_ends_at_once_takes_its_processes_along(tmp_path: Path) -> None:
    if missing := missing_packages():
        pytest.skip(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    command = [sys.executable, "-c", _ABANDON, str(tmp_path)]
    # Nothing is captured of what it leaves: a pipe that they hold would be waited for.
    with (tmp_path / "ports").open("w") as out:
        assert subprocess.run(command, stdout=out, check=False).returncode == 1
    ports = [int(port) for port in (tmp_path / "ports").read_text().split()]
    assert len(ports) == 3
    until(lambda: not any(map(is_served, ports)))
