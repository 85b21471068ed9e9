"""`icehouse demo` as a user runs it: the real model, cold, from RAM and from SSD after a restart."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from icehouse_server.demo.models import SMOLLM2

from tests.fixtures.demo_models import demo_model_dir


@pytest.mark.slow
def test_the_demo_answers_and_shows_every_tier_and_equal_texts() -> None:
    demo_model_dir(SMOLLM2)
    command = [sys.executable, "-m", "icehouse_server.cli.main", "demo", "--max-output-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is the capital of France?\nThe capital of France is Paris." in done.stdout
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    counts = re.findall(r"A long prompt \(([\d,]+) tokens\)", done.stdout)
    reusable = f"{int(counts[0].replace(',', '')) - 1:,}"
    assert f"{reusable} RAM of {counts[0]}" in rows["from RAM"]
    assert f"{reusable} SSD of {counts[0]}" in rows["from SSD"]
    assert "keep it still" in done.stdout and "the 3 texts are equal" in done.stdout
