"""Model source: finds, makes or downloads the folder of `--model`, and the model's name."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from icehouse_server.config import ModelConfig
from icehouse_server.demo.build import OnProgress, ensure_demo_model
from icehouse_server.demo.models import DEMO_MODELS
from icehouse_server.domain.model import ReplyFormatInfo, Sight
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer, sight_of
from icehouse_server.errors import ModelError, Reason

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


def locate_model(config: ModelConfig, *, on_progress: OnProgress) -> ModelSource:
    """Return where `config.model` is, and its name; makes (demo) or downloads (hub id) it when needed.

    Raises ModelError saying what to do.
    """
    folder = Path(config.model).expanduser()
    if config.model in DEMO_MODELS:
        path = ensure_demo_model(DEMO_MODELS[config.model], on_progress=on_progress)
        name = path.name
    elif folder.is_dir():
        check_files(folder)
        path, name = folder, folder.resolve().name
    elif _HUB_ID.match(config.model):
        path, name = _download(config.model), config.model
    else:
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"there is no model folder at {config.model!r}; name a folder with an MLX model, a hub id such "
            f"as mlx-community/Qwen3-0.6B-4bit, or one of: {', '.join(DEMO_MODELS)}",
            metadata={"model": config.model},
        )
    return ModelSource(path, config.model_name or name, trust_remote_code=config.trust_remote_code)


def locate_draft_model(config: ModelConfig, *, on_progress: OnProgress) -> ModelSource | None:
    """Return where `config.draft_model` is, as `locate_model` does; None without one."""
    if config.draft_model is None:
        return None
    asked = dataclasses.replace(config, model=config.draft_model, model_name=None)
    return locate_model(asked, on_progress=on_progress)


def check_files(folder: Path) -> None:
    """Raise ModelError for a folder that contains a pipe, socket or device, since reading one may never end.

    Links are followed: the hub's cache consists of them.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(Reason.MODEL_INVALID, f"{folder} cannot be read: {error.strerror}") from error
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(Reason.MODEL_INVALID, f"{path} is neither a file nor a folder; remove it")


def find_sight(path: Path) -> Sight:
    """Return whether images would be served for a model folder. Raises ModelError for no such folder."""
    return sight_of(path)


def find_reply_format(path: Path) -> ReplyFormatInfo | None:
    """Return how replies of the model would be parsed; None without a chat template. Raises ModelError."""
    return load_tokenizer(ModelSource(path, model_id=path.name)).reply_format


def _download(hub_id: str) -> Path:
    # Imported here: it takes a while, and most servers serve a folder.
    from huggingface_hub import snapshot_download

    logging.getLogger("icehouse.boot").info("hub_searched", extra={"model": hub_id})
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises its own, its HTTP library's and plain OSErrors
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"{hub_id!r} is neither a folder here nor a model that the hub gives us ({first_line}); "
            "check the name and the network, or name a folder",
            metadata={"model": hub_id},
        ) from error
