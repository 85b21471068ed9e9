"""mlx-lm's BatchGenerator on a model folder, alone in a process: the engine without a server around it.

Reads one order a line from standard input, `{"prompts": [[ids]], "max_output_tokens": n}`, runs the
prompts together and answers with one line of timings; with `"margins": true` it also says by how much each
token's logit was above the next one. Loads the folder exactly as the server does, with
OpenBLAS in front of MLX's own BLAS where the server would put it there. Run by `engine_process`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from icehouse_server.bootstrap.imports.openblas import load_openblas

from tests.fixtures.steps import whole


def main() -> None:
    """Load the model, report that, and work until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    sizes = ("completion_batch_size", "prefill_batch_size", "prefill_step_size")
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0)
    parser.add_argument("--ignore-end-tokens", action="store_true")
    arguments = parser.parse_args()
    load_openblas()
    # Output of libraries must not get between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr

    from icehouse_server.engine.runner import model_loader

    source = model_loader.ModelSource(path=arguments.model, model_id="bench", dtype=arguments.dtype)
    loaded = whole(model_loader.load_steps(source, is_hurried=lambda: False))
    config = loaded.config
    eos = config.get("eos_token_id", [])
    eos_token_ids = [eos] if isinstance(eos, int) else list(eos)
    if arguments.ignore_end_tokens:
        eos_token_ids = []
    options = {name: getattr(arguments, name) for name in sizes if getattr(arguments, name)}
    gc.collect()
    gc.freeze()  # as the server does
    import mlx.core as mx

    _say(answers, {"ready": True, "device": mx.device_info().get("device_name") or str(mx.default_device())})
    for line in sys.stdin:
        order = json.loads(line)
        replies = _run(loaded.model, order, eos_token_ids, options)
        if mx.default_device() != mx.Device(mx.cpu):
            mx.clear_cache()  # the server is on the same device
        _say(answers, {"replies": replies})


def _run(
    model: Any, order: dict[str, Any], eos_token_ids: list[int], options: dict[str, int]
) -> list[dict[str, Any]]:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, stop_tokens=[[token_id] for token_id in eos_token_ids], **options)
    prompts = order["prompts"]
    start_time_s = time.perf_counter()
    uids = generator.insert(prompts, [order["max_output_tokens"]] * len(prompts))
    times: dict[int, list[float]] = {uid: [] for uid in uids}
    ids: dict[int, list[int]] = {uid: [] for uid in uids}
    margins: dict[int, list[float]] = {uid: [] for uid in uids}
    running = set(uids)
    while running:
        responses = generator.next_generated()
        now = time.perf_counter()
        for response in responses:
            times[response.uid].append(now)
            ids[response.uid].append(response.token)
            if order.get("margins"):
                margins[response.uid].append(_margin(response.logprobs))
            if response.finish_reason is not None:
                running.discard(response.uid)
    generator.close()
    return [
        {
            "start_time_s": start_time_s,
            "token_times_s": times[uid],
            "token_ids": ids[uid],
            "margins": margins[uid],
        }
        for uid in uids
    ]


def _margin(logprobs: Any) -> float:
    import mlx.core as mx

    two = mx.sort(logprobs.reshape(-1))[-2:]
    return float((two[1] - two[0]).item())


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
