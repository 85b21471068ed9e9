"""`icehouse run` and `icehouse bench MODEL`: a real server for one command, gone when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from icehouse_server.demo.models import SMOLLM2

from tests.fixtures.demo_models import demo_model_dir

ICEHOUSE = [sys.executable, "-m", "icehouse_server.cli.main"]

pytestmark = pytest.mark.slow


def test_a_conversation_with_a_server_of_its_own() -> None:
    demo_model_dir(SMOLLM2)
    command = [*ICEHOUSE, "run", SMOLLM2.name, "--quiet", "--max-output-tokens", "16"]
    question = "What is the capital of France?\n"
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "The capital of France is Paris.\n"


def test_a_signal_takes_the_server_along() -> None:
    demo_model_dir(SMOLLM2)
    command = [*ICEHOUSE, "run", SMOLLM2.name, "--json", "--max-output-tokens", "4"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Hi\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        # Whoever still held the pipes would keep this from ending.
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM


def test_every_speed_of_this_machine() -> None:
    demo_model_dir(SMOLLM2)
    command = [*ICEHOUSE, "bench", SMOLLM2.name, "--json", "--limit-s", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    speeds = json.loads(done.stdout)["speeds"]
    assert [speed["name"] for speed in speeds if speed["tokens_per_s"] is None] == []
