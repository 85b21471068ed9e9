"""The in-process engine as the bench uses it: a child process that computes only on request."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.replies import Reply
from bench.server_process import ROOT, child_environment


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSizes:
    """Batch sizes of BatchGenerator; 0 means mlx-lm's default."""

    completion_batch_size: int = 0
    prefill_batch_size: int = 0
    prefill_step_size: int = 0


class EngineProcess:
    """mlx-lm's BatchGenerator in a process of its own, with the server's dtype.

    It is killed when it takes longer than `answer_timeout_s` over one order.
    """

    def __init__(
        self,
        *,
        model_path: Path,
        dtype: str,
        log_file: Path,
        sizes: EngineSizes = EngineSizes(),
        ignores_end_tokens: bool = False,
        environment: Mapping[str, str] | None = None,
        answer_timeout_s: float = 600.0,
    ) -> None:
        self._command = [sys.executable, "-m", "bench.engine_worker"]
        self._command += ["--model", str(model_path), "--dtype", dtype]
        for name, size in dataclasses.asdict(sizes).items():
            self._command += [f"--{name.replace('_', '-')}", str(size)]
        if ignores_end_tokens:
            self._command.append("--ignore-end-tokens")
        self._environment = child_environment(environment)
        self.device = ""
        """The device's name as MLX reports it."""
        self._log_file = log_file
        self._answer_timeout_s = answer_timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> EngineProcess:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.device = self._hear()["device"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def generate(self, prompts: Sequence[Sequence[int]], *, max_output_tokens: int) -> list[Reply]:
        """Run the prompts as one batch, greedily, and return the time of each token."""
        order = {"prompts": [list(prompt) for prompt in prompts], "max_output_tokens": max_output_tokens}
        return [
            Reply(reply["start_time_s"], tuple(reply["token_times_s"]), tuple(reply["token_ids"]))
            for reply in self._carry_out(order)
        ]

    def alone(self, prompt: Sequence[int], *, max_output_tokens: int) -> list[tuple[int, float]]:
        """Run one prompt by itself and return its tokens, each with its lead over the next likely one."""
        order = {"prompts": [list(prompt)], "max_output_tokens": max_output_tokens, "margins": True}
        (reply,) = self._carry_out(order)
        return list(zip(reply["token_ids"], reply["margins"], strict=True))

    def _carry_out(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        replies: list[dict[str, Any]] = self._hear()["replies"]
        return replies

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        limit = threading.Timer(self._answer_timeout_s, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(
                f"the in-process engine ended, or took more than {self._answer_timeout_s:g} s; "
                f"see {self._log_file}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
