"""A server's whole life in a process of its own, over whatever mlx-lm is first on its path: prompts are asked
one after the other, and what came of them is printed as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from icehouse.v1 import inference_service_pb2 as pb

from tests.fixtures.whole_server import whole_server

PROMPTS = [[3 + (i * 7 + i * i + salt) % 290 for i in range(94 + 35 * salt)] for salt in range(4)]
BOUND_S = 300.0


def answers(packages: Path, model: Path, directory: Path) -> dict[str, Any]:
    """Ask every prompt of a server that starts and stops over the packages in a folder."""
    path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    command = [sys.executable, "-m", __name__, str(packages), str(model), str(directory)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def _asked(model: Path, directory: Path) -> dict[str, Any]:
    told = []
    settings: dict[str, Any] = {
        "model__dtype": "float32",
        "cache__block_token_count": 16,
        "cache__min_prefix_token_count": 0,
        "cache__restore_or_recompute": False,
    }
    async with whole_server(model, directory, **settings) as served:
        stats = (await served.inference.CacheStats(pb.CacheStatsRequest())).cache
        for prompt in PROMPTS:
            asked = pb.GenerateRequest(max_output_tokens=8)
            asked.prompt.tokens.ids.extend(prompt)
            told.append(await served.inference.Generate(asked))
    return {
        "tokens": [list(answer.token_ids) for answer in told],
        "ssd_tokens": [answer.usage.ssd_tokens for answer in told],
        "changed_code": list(stats.last_reconcile.changed_code),
    }


if __name__ == "__main__":
    import mlx_lm

    packages, model, directory = map(Path, sys.argv[1:])
    assert Path(mlx_lm.__file__).is_relative_to(packages), "another mlx-lm came first"
    print(json.dumps(asyncio.run(_asked(model, directory))))
