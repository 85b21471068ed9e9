"""mlx-vlm's own generation in a child process: the replacement if its server cannot be started.

This is `stream_generate`, which keeps nothing from one call to the next. The model is loaded once; a line of
JSON is a call.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.mlx_vlm_server import PeerReply
from bench.server_process import ROOT, child_environment, other_server_environment

_READY = "ready"


class MlxVlmProcess:
    """A process with a model; ready when `__enter__` returns. OpenBLAS as icehouse has it."""

    name = "mlx-vlm's generation"

    def __init__(self, *, model_path: Path, log_file: Path) -> None:
        self._model_path = model_path
        self._log_file = log_file
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> MlxVlmProcess:
        environment = other_server_environment(child_environment())
        command = [sys.executable, "-m", "bench.mlx_vlm_process", str(self._model_path)]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert self._told() == _READY, f"mlx-vlm did not load the model; see {self._log_file}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, picture: bytes, turns: Sequence[str], *, max_output_tokens: int) -> PeerReply:
        """Generate from turns of user and assistant, with a picture before the first."""
        assert self._process is not None and self._process.stdin is not None, "it does not run"
        image = base64.b64encode(picture).decode("ascii")
        call = {"turns": list(turns), "image": image, "max_output_tokens": max_output_tokens}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return PeerReply(float(self._told()))

    def _told(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"mlx-vlm's process has ended; see {self._log_file}"
        return line.strip()

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Load the model and answer calls until the input ends."""
    from mlx_vlm.generate import stream_generate
    from mlx_vlm.utils import load
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    model, processor = load(str(parser.parse_args().model))
    # Output of libraries must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(_READY, file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        began = time.perf_counter()
        shown: list[Any] = [Image.open(io.BytesIO(base64.b64decode(call["image"])))]
        tokens = stream_generate(
            model,
            processor,
            _prompt(call["turns"]),
            image=shown,
            max_tokens=call["max_output_tokens"],
            temperature=0.0,
        )
        times = [time.perf_counter() for _ in tokens]
        print(times[0] - began, file=answers, flush=True)


def _prompt(turns: Sequence[str]) -> str:
    """Return the prompt that the model's chat template makes."""
    first, *others = turns
    told = [f"<|vision_start|><|image_pad|><|vision_end|>{first}", *others]
    roles = ("user", "assistant")
    text = "".join(f"<|im_start|>{roles[n % 2]}\n{turn}<|im_end|>\n" for n, turn in enumerate(told))
    return f"{text}<|im_start|>assistant\n"


if __name__ == "__main__":
    main()
