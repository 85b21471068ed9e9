"""Hub of models: fetches models into the cache on this machine.

The cache belongs to the `huggingface_hub` library and is shared with other programs; HF_HOME moves it. The
library is imported when needed: that takes a while, and most servers serve a folder.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import re
from collections.abc import Callable
from pathlib import Path

from icehouse_server.bootstrap.room import WEIGHT_FILES, ModelSize
from icehouse_server.errors import IcehouseError, ModelError, Reason

_log = logging.getLogger("icehouse.boot")

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_DENSE_FILES = "*_Dense/model.safetensors"
"""Layers after the pooling of an embedding model, each in its own folder."""
_TEXTS = ("*.json", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
_FILES = [*_TEXTS, WEIGHT_FILES, _DENSE_FILES]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, `owner/name`."""
    return _ID.match(name) is not None


def fetch(hub_id: str, *, on_size: Callable[[ModelSize], None]) -> Path:
    """Return the folder of a model, after downloading what is missing from the cache.

    `on_size` gets the size of the download before it begins, and may raise an IcehouseError. Raises
    ModelError if the hub cannot be reached or does not provide the model.
    """
    from huggingface_hub import snapshot_download

    _log.info("hub_searched", extra={"model": hub_id})
    try:
        if not _is_cached(hub_id):
            size = _size(hub_id)
            on_size(size)
            _log.info("download_started", extra={"model": hub_id, "size_bytes": size.missing_bytes})
        return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except IcehouseError:  # from `on_size`
        raise
    except Exception as error:  # the hub client raises its own, its HTTP library's and plain OSErrors
        raise _refusal(hub_id, error) from error


def cache_folder() -> Path:
    """Return the folder of the hub's cache, whether or not it exists."""
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
    from huggingface_hub import snapshot_download

    files = snapshot_download(hub_id, allow_patterns=_FILES, dry_run=True)
    weights = (file for file in files if fnmatch.fnmatch(file.filename, WEIGHT_FILES))
    return ModelSize(
        weight_bytes=sum(file.file_size or 0 for file in weights),
        missing_bytes=sum(file.file_size or 0 for file in files if file.will_download),
        place=cache_folder(),
    )


def _refusal(hub_id: str, error: Exception) -> ModelError:
    """Return why the model is not available, with what to do."""
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, DryRunError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    match error:
        case GatedRepoError():
            what = (
                f"the hub gives {hub_id} only to those who accepted its terms; accept them on the model's "
                "page, then run `hf auth login`"
            )
        case RepositoryNotFoundError():
            what = f"the hub has no model {hub_id}, or it is private; check the name, or run `hf auth login`"
        case OSError(errno=errno.ENOSPC):
            what = f"the disk is full, and {hub_id} is not completely here; make room in {cache_folder()}"
        case _:
            is_off = OfflineModeIsEnabled in (type(error), type(error.__cause__))
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            why = "HF_HUB_OFFLINE forbids it" if is_off else said
            what = (
                f"the hub cannot be reached ({why}), and {hub_id} is not completely in {cache_folder()}; "
                "check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or name a folder"
            )
    return ModelError(Reason.MODEL_NOT_FOUND, what, metadata={"model": hub_id})
