"""`python -m bench.group.pipelines`: two processes with half of the layers, or of each layer (mlx-lm alone).

A small Qwen 2 with random weights is computed by one process, by two that divide every layer (tensor
parallelism, `shard`), and by two that have half of the layers each (a pipeline, `pipeline`).
They are connected by MLX's ring over loopback. Nothing of Icehouse runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from rich.table import Table

from bench.report import console
from bench.server_process import ROOT, child_environment, free_ports

_MODES = ("one process", "tensor", "pipeline")
_ROWS = (1, 16)
_CHUNK = 500
_TIMEOUT_S = 240.0
_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}


def main() -> None:
    """Measure and print the table, or be one rank of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.group.pipelines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=20, help="decode passes of a round")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--rank-of", choices=_MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        _be_rank(arguments.rank_of, passes=arguments.passes, prompt=arguments.prompt)
        return
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in _MODES}
    for _ in range(arguments.rounds):
        for mode in _MODES:
            found[mode].append(_run(mode, sys.argv[1:]))
    table = Table("", *(f"pass of {rows} row{'s' * (rows > 1)}, ms" for rows in _ROWS), "prompt, s", "token")
    for mode, rounds in found.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        rows = (f"{1000 * median[f'{rows} rows']:.1f}" for rows in _ROWS)
        table.add_row(mode, *rows, f"{median['prompt']:.2f}", f"{median['token']:.0f}")
    console.print(table)


def _run(mode: str, options: list[str]) -> dict[str, float]:
    """Run all ranks of a mode; return what rank 0 measured."""
    world = 1 if mode == "one process" else 2
    with tempfile.TemporaryDirectory(prefix="icehouse-pipelines-") as name:
        hosts = Path(name) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(world)]))
        command = [sys.executable, "-m", "bench.group.pipelines", *options, "--rank-of", mode]
        environment = {**child_environment(), "OPENBLAS_NUM_THREADS": "1"}  # a core for each rank
        ranks = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
                stdout=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        try:
            outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    measured: dict[str, float] = json.loads(outputs[0])
    return measured


def _be_rank(mode: str, *, passes: int, prompt: int) -> None:
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(_CONFIG))
    mx.eval(model.parameters())
    if mode != "one process":
        group = mx.distributed.init(strict=True, backend="ring")
        divide: Any = model.shard if mode == "tensor" else model.model.pipeline
        divide(group)
        mx.eval(model.parameters())
    measured = {f"{rows} rows": _pass_s(model, rows, passes) for rows in _ROWS}
    measured["prompt"], measured["token"] = _prompt_s(model, prompt)
    if os.environ["MLX_RANK"] == "0":
        print(json.dumps(measured))


def _pass_s(model: Any, rows: int, passes: int) -> float:
    """Return the median of what a decode pass takes."""
    cache: Any = make_prompt_cache(model)
    token = mx.full((rows, 1), 7)
    durations = []
    for _ in range(passes + 2):
        began = time.monotonic()
        token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        mx.eval(token, [each.state for each in cache])
        durations.append(time.monotonic() - began)
    return statistics.median(durations[2:])


def _prompt_s(model: Any, prompt: int) -> tuple[float, float]:
    """Return how long the prompt takes, up to its first token, and which that is."""
    cache: Any = make_prompt_cache(model)
    tokens = mx.array([[(place * 37) % 500 for place in range(prompt)]])
    began = time.monotonic()
    for start in range(0, prompt, _CHUNK):
        logits = model(tokens[:, start : start + _CHUNK], cache=cache)
        # As in mlx-lm: only the last chunk's logits are wanted, so the first stage goes ahead.
        mx.eval([each.state for each in cache])
    first = float(mx.argmax(logits[0, -1]).item())
    return time.monotonic() - began, first


if __name__ == "__main__":
    main()
