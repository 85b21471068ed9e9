"""The heap that keeps what is freed, in a process of its own: it is set once for good."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest

_CHILD = """
import json, resource
from icehouse_server import heap
heap.keep_freed()
assert heap.is_kept()
import mlx.core as mx
from icehouse_server.engine.runner.freed_buffers import FreedBuffers

MIB = 1 << 20

def faults(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [mx.ones(size * MIB // 4) for size in sizes]
    mx.eval(arrays)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

freed = FreedBuffers()
freed.bound(128 << 10, memory_limit_bytes=3200 * MIB)  # an eighth may be kept
found = {"first": faults([40] * 6)}
freed.trim()
# MLX keeps one of them, in the middle perhaps; these fit on either side of it.
found["of other sizes"] = faults([35, 25, 30, 10])
freed.trim()
kept = heap.resident_bytes()
faults([50] * 10)
found["more"] = heap.resident_bytes() - kept
freed.trim()
found["left"] = heap.resident_bytes() - kept
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu),
    reason="only there arrays are of the heap",
)
def test_freed_memory_serves_arrays_of_other_sizes_and_is_given_back_beyond_the_limit() -> None:
    child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["first"] > 50_000, "240 MiB of fresh pages"
    assert found["of other sizes"] < found["first"] / 10
    assert found["more"] > 200 << 20
    assert found["left"] < 0, "more than the limit was free, and all of it went back"
