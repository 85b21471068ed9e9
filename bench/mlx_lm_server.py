"""mlx-lm's own HTTP server as a child process, for side-by-side numbers on the same model and prompts."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from bench.server_process import ROOT, free_port, other_server_environment

_POLL_S = 0.2


class MlxLmServer:
    """`mlx_lm server` at its defaults, with OpenBLAS as in icehouse; ready when `__enter__` returns."""

    def __init__(self, *, model_path: Path, log_file: Path, boot_timeout_s: float = 120.0) -> None:
        self._model_path = model_path
        self._log_file = log_file
        self._boot_timeout_s = boot_timeout_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Its port on loopback, once entered."""
        return self._port

    def __enter__(self) -> MlxLmServer:
        self._port = free_port()
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(self._model_path)]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        environment = other_server_environment(os.environ)
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            self._wait_until_healthy(time.monotonic() + self._boot_timeout_s)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ttft_s(self, text: str, *, max_output_tokens: int) -> float:
        """Stream one greedy completion and return the seconds until its first text."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        body = json.dumps(
            {"prompt": text, "max_tokens": max_output_tokens, "temperature": 0.0, "stream": True}
        )
        start_time_s = time.perf_counter()
        first: float | None = None
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == http.client.OK, f"mlx-lm answered {answer.status}: {answer.read(300)!r}"
            for raw in answer:
                line = raw.decode("utf-8").strip()
                if first is None and _has_text(line):
                    first = time.perf_counter()
        finally:
            connection.close()
        assert first is not None, "mlx-lm's completion had no text"
        return first - start_time_s

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"mlx-lm's server ended with {self._process.returncode}; {self._log_file}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"mlx-lm's server was not ready in time; see {self._log_file}")
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _has_text(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    return any(choice.get("text") for choice in json.loads(line[len("data: ") :])["choices"])
