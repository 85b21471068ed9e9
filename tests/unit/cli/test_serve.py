"""A server ends though work goes on that nothing can stop."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STUCK = """
import asyncio, concurrent.futures, logging, threading
from icehouse_server.cli import serve

logging.basicConfig(level=logging.INFO, format="%(message)s %(threads)s")
if {is_stuck}:
    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="tokenizer").submit(threading.Event().wait)
asyncio.run(serve._leave_stuck_work({code}))
"""


@pytest.mark.parametrize(("is_stuck", "code", "expected"), [(True, 0, 0), (True, 1, 1), (False, 1, 0)])
def test_stuck_work_does_not_keep_the_process(is_stuck: bool, code: int, expected: int) -> None:
    program = _STUCK.format(is_stuck=is_stuck, code=code)
    path = [*filter(None, sys.path)]
    boot = f"import sys; sys.path[:] = {path!r}\n{program}"
    ended = subprocess.run([sys.executable, "-c", boot], timeout=60, capture_output=True, text=True)
    assert ended.returncode == expected, ended.stderr
    assert ("stuck_work_abandoned tokenizer_0" in ended.stderr) is is_stuck
