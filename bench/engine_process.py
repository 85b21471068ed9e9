"""The in-process engine as the bench sees it: a child that computes only while it is asked to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.replies import Reply
from bench.server_process import ROOT, child_environment


class EngineProcess:
    """mlx-lm's BatchGenerator in a process of its own; its default batch sizes, the server's dtype.

    `prefill_step` 0 leaves the tokens of a prefill step at its default too.
    """

    def __init__(self, *, model_path: Path, dtype: str, log_file: Path, prefill_step: int = 0) -> None:
        self._command = [sys.executable, "-m", "bench.engine_worker"]
        self._command += ["--model", str(model_path), "--dtype", dtype, "--prefill-step", str(prefill_step)]
        self._log_file = log_file
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> EngineProcess:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._hear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def generate(self, prompts: Sequence[Sequence[int]], *, max_output_tokens: int) -> list[Reply]:
        """Run the prompts as one batch, greedily, and return when each token was there."""
        assert self._process is not None and self._process.stdin is not None
        order = {"prompts": [list(prompt) for prompt in prompts], "max_output_tokens": max_output_tokens}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return [
            Reply(reply["start_time_s"], tuple(reply["token_times_s"]), tuple(reply["token_ids"]))
            for reply in self._hear()["replies"]
        ]

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the in-process engine ended; see {self._log_file}")
        answer: dict[str, Any] = json.loads(line)
        return answer
