"""mlx-vlm's own HTTP server as a child process, for side-by-side numbers on the same model and pictures.

It needs packages that nothing else here needs (FastAPI and more). `make bench CASE=vision` installs them into
a separate folder, which precedes this process's packages in that child alone.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.server_process import ROOT, child_environment, free_port, other_server_environment

PACKAGES_FOLDER = ROOT / "build" / "mlx-vlm-server"
"""Where `make bench CASE=vision` installs .ci/mlx-vlm-server-requirements.txt."""

_MODULES = ("fastapi", "uvicorn", "multipart", "websockets", "mlx_audio", "miniaudio")
_POLL_S = 0.2
_STOP_TIMEOUT_S = 30.0
_REPLY_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReply:
    """A peer's answer to one call."""

    ttft_s: float
    cached_tokens: int = 0
    """Cached tokens of the prompt, as the peer counts them."""


def missing_modules() -> list[str]:
    """Return the modules that the server needs and that neither its folder nor this environment has."""
    paths = [str(PACKAGES_FOLDER), *sys.path]
    return [name for name in _MODULES if importlib.machinery.PathFinder.find_spec(name, paths) is None]


class MlxVlmServer:
    """`mlx_vlm.server`; ready when `__enter__` returns. OpenBLAS as icehouse has it.

    At its defaults it keeps the vectors of the 20 latest pictures and no KV. With a `cache_directory` its
    prefix cache (APC) is on as well, with its defaults of 2,048 blocks of 16 tokens in memory, and a tier
    on disk there.
    """

    def __init__(
        self,
        *,
        model_path: Path,
        log_file: Path,
        cache_directory: Path | None = None,
        boot_timeout_s: float = 180.0,
    ) -> None:
        self.name = "mlx-vlm's server" + (", its prefix cache on" if cache_directory else "")
        self._model_path = model_path
        self._log_file = log_file
        self._cache_directory = cache_directory
        self._boot_timeout_s = boot_timeout_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MlxVlmServer:
        self._port = free_port()
        command = [sys.executable, "-m", "mlx_vlm.server", "--model", str(self._model_path)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "WARNING"]
        with self._log_file.open("ab") as log:
            # In another session, so that Ctrl-C reaches only the parent, which stops the server cleanly.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
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

    def ask(self, picture: bytes, turns: Sequence[str], *, max_output_tokens: int) -> PeerReply:
        """Stream one greedy reply to turns of user and assistant, with a PNG before the first, and return
        when its first token came."""
        body = json.dumps(
            {
                "model": str(self._model_path),
                "messages": _messages(picture, turns),
                "max_tokens": max_output_tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        return reply_of(self._port, body)

    def _environment(self) -> Mapping[str, str]:
        environment = other_server_environment(child_environment())
        paths = (str(PACKAGES_FOLDER), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment["APC_ENABLED"] = "0" if self._cache_directory is None else "1"
        if self._cache_directory is not None:
            environment["APC_DISK_PATH"] = str(self._cache_directory)
        return environment

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"mlx-vlm's server ended with {self._process.returncode}; {self._log_file}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"mlx-vlm's server was not ready in time; see {self._log_file}")
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
        """Ask it to end, so that it writes the rest of its cache; kill its group if it does not end."""
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def reply_of(port: int, body: str) -> PeerReply:
    """Post a chat completion to a server on loopback, and time the first token of its stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REPLY_TIMEOUT_S)
    start_time_s = time.perf_counter()
    first_s: float | None = None
    cached_tokens = 0
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == http.client.OK, f"mlx-vlm answered {answer.status}: {answer.read(300)!r}"
        for raw in answer:
            told = _event_of(raw)
            assert "error" not in told, f"mlx-vlm failed: {told['error']}"
            if first_s is None and told.get("choices"):
                first_s = time.perf_counter() - start_time_s
            details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
            cached_tokens = int(details.get("cached_tokens") or cached_tokens)
    finally:
        connection.close()
    assert first_s is not None, "mlx-vlm's completion had no token"
    return PeerReply(first_s, cached_tokens)


def _messages(picture: bytes, turns: Sequence[str]) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    first, *others = turns
    told: list[dict[str, Any]] = [{"role": "user", "content": [shown, {"type": "text", "text": first}]}]
    roles = ("assistant", "user")
    return told + [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(others)]


def _event_of(raw: bytes) -> dict[str, Any]:
    """Return the event of a line of the stream; empty for other lines."""
    line = raw.decode("utf-8").strip()
    if not line.startswith("data: {"):
        return {}
    found = json.loads(line[len("data: ") :])
    return found if isinstance(found, dict) else {}
