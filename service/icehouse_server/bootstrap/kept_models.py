"""Kept models: those on this machine that `icehouse pull` fetches and `rm` removes, and whether they are in
use.

They are the demo models that were built, and those in the hub's cache. A running server holds a shared lock
on the folders of its models, so that nobody removes them meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from icehouse_server.bootstrap import hub
from icehouse_server.bootstrap.room import ModelSize, check_disk
from icehouse_server.demo.build import (
    BUILT_BYTES,
    OnProgress,
    ensure_demo_model,
    is_built,
    remove_demo_model,
)
from icehouse_server.demo.models import DEMO_MODELS
from icehouse_server.errors import ModelError, Reason

if TYPE_CHECKING:
    # Slow to import, so not imported at run time before it is used.
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


@dataclasses.dataclass(frozen=True, slots=True)
class KeptModel:
    """A model on this machine."""

    name: str
    """The name for `icehouse serve`."""
    size_bytes: int
    read_time: float
    """Unix time at which one of its files was last read, as far as the file system records it."""
    folder: Path
    is_in_use: bool
    """Whether a server on this machine uses it; False if the file system has no locks."""


def kept_models() -> list[KeptModel]:
    """Return all models on this machine: the demo models, then those in the hub's cache, by name."""
    demos = [_demo_entry(name) for name, model in DEMO_MODELS.items() if is_built(model)]
    return demos + sorted(map(_hub_entry, cached_repos()), key=lambda model: model.name)


def pull(name: str, *, on_progress: OnProgress) -> KeptModel:
    """Fetch a model from the hub, or build a demo model, if it is not here yet. Raises ModelError."""
    if name in DEMO_MODELS:
        demo = DEMO_MODELS[name]
        if not is_built(demo):
            check_disk(name, ModelSize(weight_bytes=0, missing_bytes=BUILT_BYTES, place=demo.folder))
        ensure_demo_model(demo, on_progress=on_progress)
    elif hub.is_hub_id(name):
        hub.fetch(name, on_size=lambda size: check_disk(name, size))
    else:
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"{name!r} is not an id on the hub, such as mlx-community/Qwen3-0.6B-4bit, or one of: "
            f"{', '.join(DEMO_MODELS)}",
            metadata={"model": name},
        )
    return find(name)


def find(name: str) -> KeptModel:
    """Return a model that is here; raises ModelError for any other."""
    for model in kept_models():
        if name == model.name:
            return model
    raise ModelError(
        Reason.MODEL_NOT_FOUND,
        f"there is no model {name!r} here; `icehouse ls` lists those that are",
        metadata={"model": name},
    )


def remove(model: KeptModel) -> None:
    """Remove a model that is here. Raises ModelError if a server uses it or the disk refuses."""
    if model.is_in_use:
        raise ModelError(
            Reason.STORE_LOCKED,
            f"{model.name} is in use by a server on this machine; stop that server first",
            metadata={"model": model.name},
        )
    try:
        _remove(model)
    except OSError as error:
        raise ModelError(
            Reason.MODEL_INVALID,
            f"{model.folder} cannot be removed: {error.strerror or error}; is it yours?",
            metadata={"model": model.name},
        ) from error


def _remove(model: KeptModel) -> None:
    if model.name in DEMO_MODELS:
        remove_demo_model(DEMO_MODELS[model.name])
        return
    revisions = [
        r.commit_hash for repo in cached_repos() if repo.repo_id == model.name for r in repo.revisions
    ]
    _scanned().delete_revisions(*revisions).execute()


def cached_repos() -> list[CachedRepoInfo]:
    """Return the models in the hub's cache."""
    repos = _scanned().repos if hub.cache_folder().is_dir() else ()
    return [repo for repo in repos if repo.repo_type == "model"]


def _scanned() -> HFCacheInfo:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir()


@contextlib.contextmanager
def held(*folders: Path) -> Iterator[None]:
    """Mark these model folders as in use while the block runs."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            # Models are also served from file systems without locks.
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _demo_entry(name: str) -> KeptModel:
    folder = DEMO_MODELS[name].folder
    files = [path.stat() for path in folder.iterdir()]
    return KeptModel(
        name=name,
        size_bytes=sum(file.st_size for file in files),
        # Other files are read to learn whether the model is there.
        read_time=(folder / "model.safetensors").stat().st_atime,
        folder=folder,
        is_in_use=_is_in_use(folder),
    )


def _hub_entry(repo: CachedRepoInfo) -> KeptModel:
    return KeptModel(
        name=repo.repo_id,
        size_bytes=repo.size_on_disk,
        read_time=repo.last_accessed,
        folder=repo.repo_path,
        # A server serves the folder of one revision.
        is_in_use=any(_is_in_use(revision.snapshot_path) for revision in repo.revisions),
    )


def _is_in_use(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
