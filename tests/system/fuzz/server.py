"""Server under the fuzzer: a real process with everything on, and limits that keep each request short."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from bench.server_process import free_port
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.fixtures.models.chat_templates import THINKING, write_family
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE
from tests.fixtures.rpc.worker import HAS_PROTOCOL
from tests.system.crash.crashing_server import ServerProcess
from tests.system.fuzz.values import ADAPTER_NAME, MESSAGE_BYTE_LIMIT, MODEL_NAME, TENANTS

_FLAGS: Mapping[str, str] = {
    "model-name": MODEL_NAME,
    "context-token-limit": "512",
    "default-max-output-tokens": "3",
    "max-output-tokens-limit": "8",
    "max-completions": "4",
    "max-embedding-inputs": "8",
    "max-rerank-documents": "8",
    "max-message-bytes": str(MESSAGE_BYTE_LIMIT),
    "grammar-timeout-s": "2",
    # A caller that has no core for a while is not to be taken for lost, and its calls cut off.
    "keepalive-s": "3600",
    "block-token-count": "16",
    "min-prefix-token-count": "16",
    "ram-bytes": str(8 << 20),
    "ssd-bytes": str(64 << 20),
    "shared-prefixes": TENANTS[0],
    "log-level": "warning",
}
_IMAGE_FLAGS: Mapping[str, str] = {
    "max-images": "4",
    "max-image-pixels": "4000000",
    # What is named there is not there: nothing listens, and no such folder is.
    "image-folders": "/nowhere/pictures",
    "image-hosts": "127.0.0.1:1",
    "image-fetch-timeout-s": "0.5",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Fuzzed:
    """A running server, and what callers need to know of it."""

    process: ServerProcess
    log: Path
    tokens: Mapping[str, str]

    def rss_bytes(self) -> int:
        """Return the memory that the process has."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the process has ended")

    def complaints(self) -> list[str]:
        """Return the lines of the log that tell of an exception or an error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if "Traceback" in line or " error: " in line or " critical: " in line]


@contextlib.contextmanager
def fuzzed(folder: Path) -> Iterator[Fuzzed]:
    """Start a server in `folder` and end it; on the way out it must end as any other, with 0."""
    model = folder / "llama"
    options = ["--adapters", f"{ADAPTER_NAME}={folder / 'adapter'}", "--draft-model", str(model)]
    if not model.exists():
        tiny_model_dir(
            folder, "llama", num_hidden_layers=3, vocab_size=VOCABULARY_SIZE + len(THINKING.tokens)
        )
        write_family(model, THINKING)
        tiny_adapter_dir(folder, model, seed=1, name="adapter")
    with _started(folder, model, (*options, *(["--worker"] if HAS_PROTOCOL else []))) as running:
        yield running


@contextlib.contextmanager
def fuzzed_with_images(folder: Path, family: str = "smolvlm") -> Iterator[Fuzzed]:
    """Start one whose model sees; needs mlx-vlm."""
    from tests.fixtures.models.vision import tiny_vision_dir

    options = [word for name, value in _IMAGE_FLAGS.items() for word in (f"--{name}", value)]
    options += ["--worker"] if HAS_PROTOCOL else []
    with _started(folder, tiny_vision_dir(folder, family), tuple(options)) as running:
        yield running


@contextlib.contextmanager
def _started(folder: Path, model: Path, more_options: tuple[str, ...]) -> Iterator[Fuzzed]:
    tokens = {name: new_token() for name in ("operator", *TENANTS)}
    token_file, log = folder / "tokens", folder / "log"
    lines = [
        line_of(
            token,
            tenant=name,
            role=CallerRole.OPERATOR if name == "operator" else CallerRole.TENANT,
            expire_date=None,
        )
        for name, token in tokens.items()
    ]
    token_file.write_text("\n".join(lines), encoding="utf-8")
    token_file.chmod(0o600)
    options = [word for name, value in _FLAGS.items() for word in (f"--{name}", value)]
    options += ["--token-file", str(token_file), "--channelz", "--load-report", "--no-access-log"]
    options += more_options
    process = ServerProcess(
        model=model, directory=folder / "blocks", log=log, options=tuple(options), port=free_port()
    )
    with process:
        process.wait_until_serving()
        yield Fuzzed(process, log, tokens)
        process.terminate()
        code = process.wait()
        assert code == 0, f"the server ended with {code}; see {log}"
