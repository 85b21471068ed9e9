"""Hub of models: fetches one into the cache on this machine, and tells and removes what is there.

The cache is the `huggingface_hub` library's, which other programs share; HF_HOME moves it. The library is
imported when it is needed: that takes a while, and most servers serve a folder.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icehouse_server.bootstrap.room import WEIGHT_FILES, ModelSize
from icehouse_server.errors import IcehouseError, ModelError, Reason

_log = logging.getLogger("icehouse.boot")

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_FILES = ["*.json", WEIGHT_FILES, "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
_TIMEOUT_S = 10.0
"""For the question how large a model is; the library has its own for downloads."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the hub's cache, with all of its revisions."""

    hub_id: str
    size_bytes: int
    read_time: float
    """Unix time at which one of its files was read last, as far as the file system keeps it."""
    folder: Path
    snapshots: tuple[Path, ...]
    """One folder for each revision: what a server serves."""
    revisions: tuple[str, ...]


def is_hub_id(name: str) -> bool:
    """Whether a name is of the hub's form, `owner/name`."""
    return _ID.match(name) is not None


def fetch(hub_id: str, *, on_size: Callable[[ModelSize], None]) -> Path:
    """Return the folder of a model, and download what of it is not in the cache.

    `on_size` is told how much that is before it is downloaded, and may raise an IcehouseError. Raises
    ModelError when the hub cannot be reached or does not give the model.
    """
    from huggingface_hub import snapshot_download

    _log.info("hub_searched", extra={"model": hub_id})
    try:
        if not _is_cached(hub_id):
            size = _size(hub_id)
            on_size(size)
            _log.info("download_started", extra={"model": hub_id, "size_bytes": size.missing_bytes})
        return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except IcehouseError:  # of `on_size`
        raise
    except Exception as error:  # the hub client raises its own, its HTTP library's and plain OSErrors
        raise _refusal(hub_id, error) from error


def cached_models() -> list[CachedModel]:
    """Return the models in the hub's cache, by name."""
    found = [
        CachedModel(
            hub_id=repo.repo_id,
            size_bytes=repo.size_on_disk,
            read_time=repo.last_accessed,
            folder=repo.repo_path,
            snapshots=tuple(revision.snapshot_path for revision in repo.revisions),
            revisions=tuple(revision.commit_hash for revision in repo.revisions),
        )
        for repo in (_scanned().repos if _cache_folder().is_dir() else ())
        if repo.repo_type == "model"
    ]
    return sorted(found, key=lambda model: model.hub_id)


def remove(model: CachedModel) -> None:
    """Remove every revision of a model from the cache. Raises OSError from the disk."""
    _scanned().delete_revisions(*model.revisions).execute()


def _scanned() -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir()


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_cached(hub_id: str) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(hub_id, allow_patterns=_FILES, local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True


def _size(hub_id: str) -> ModelSize:
    from huggingface_hub import HfApi, try_to_load_from_cache

    info = HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or ()
        if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in _FILES)
    }
    missing = [n for n in sizes if not isinstance(try_to_load_from_cache(hub_id, n, revision=info.sha), str)]
    return ModelSize(
        weight_bytes=sum(size for name, size in sizes.items() if fnmatch.fnmatch(name, WEIGHT_FILES)),
        missing_bytes=sum(sizes[name] for name in missing),
        place=_cache_folder(),
    )


def _refusal(hub_id: str, error: Exception) -> ModelError:
    """Return why there is no such model here, in words that say what to do."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    match error:
        case GatedRepoError():
            what = (
                f"the hub gives {hub_id} only to those who accepted its terms; accept them on the model's "
                "page, then say `hf auth login`"
            )
        case RepositoryNotFoundError():
            what = f"the hub has no model {hub_id}, or it is private; check the name, or say `hf auth login`"
        case OSError(errno=errno.ENOSPC):
            what = f"the disk is full, and {hub_id} is not here completely; make room in {_cache_folder()}"
        case _:
            is_off = OfflineModeIsEnabled in (type(error), type(error.__cause__))
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            why = "HF_HUB_OFFLINE forbids it" if is_off else said
            what = (
                f"the hub cannot be reached ({why}), and {hub_id} is not completely in {_cache_folder()}; "
                "check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or name a folder"
            )
    return ModelError(Reason.MODEL_NOT_FOUND, what, metadata={"model": hub_id})
