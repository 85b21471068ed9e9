"""gRPC takes the xDS bootstrap file: it fails to reach the control plane, not to read the file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from icehouse_server.config import SETTINGS

FOLDER = Path(__file__).parents[3] / "deploy/xds"

ASK = """
import grpc, sys
channel = grpc.insecure_channel("xds:///icehouse")
try:
    channel.unary_unary("/icehouse.v1.InferenceService/Generate")(b"", timeout=20)
except grpc.RpcError as error:
    print(error.details())
"""


def answer_with(bootstrap: str) -> str:
    """Return what a client in a process of its own says; gRPC reads the file once in a process."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        env={"GRPC_XDS_BOOTSTRAP_CONFIG": bootstrap, "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return asked.stdout


def test_grpc_takes_the_bootstrap() -> None:
    # Nobody listens on port 1, whoever runs a control plane here.
    told = answer_with((FOLDER / "bootstrap.json").read_text().replace("18000", "1"))
    assert "xDS channel for server 127.0.0.1:1" in told and "node ID:icehouse-client" in told


@pytest.mark.parametrize("missing", ["channel_creds", "xds_servers"])
def test_a_bootstrap_that_lacks_something_would_be_noticed(missing: str) -> None:
    told = answer_with((FOLDER / "bootstrap.json").read_text().replace(missing, "something_else"))
    assert "field not present" in told


def test_the_flags_of_the_notes_exist() -> None:
    told = set(re.findall(r"`(--[a-z-]+)`", (FOLDER / "README.md").read_text()))
    assert told and told <= {setting.flag for setting in SETTINGS}
