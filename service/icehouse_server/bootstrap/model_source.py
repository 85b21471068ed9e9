"""Model source: finds, builds or downloads the folder of `--model`, and names the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from icehouse_server.bootstrap import hub
from icehouse_server.bootstrap.room import ModelSize, folder_size
from icehouse_server.config import Config, ModelConfig
from icehouse_server.config.setting import NamedPath
from icehouse_server.demo.build import BUILT_BYTES, OnProgress, ensure_demo_model, is_built
from icehouse_server.demo.models import DEMO_MODELS
from icehouse_server.domain.ids import AdapterName
from icehouse_server.domain.model import ReplyFormatInfo, Sight
from icehouse_server.engine.runner.identity.fingerprint import adapter_digest, read_json
from icehouse_server.engine.runner.model_loader import (
    AdapterSource,
    ModelSource,
    load_tokenizer,
    reads_whole,
    sight_of,
)
from icehouse_server.errors import ModelError, Reason, model_invalid
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.text.tokenizer import Tokenizer
from icehouse_server.text.tokenizer_archive import tokenizer_digest_hex

OnSize = Callable[[str, ModelSize], None]
"""Called with a model's name and size as soon as it is known, before anything is fetched. May raise an
IcehouseError."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModels:
    """The model of a server, and its draft model."""

    model: ModelSource
    draft: ModelSource | None

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.model.path,) if self.draft is None else (self.model.path, self.draft.path)


def served_name(config: ModelConfig) -> str:
    """Return the name that callers use for a model; it need not be here yet."""
    if config.model_name is not None:
        return config.model_name
    if config.model in DEMO_MODELS:
        return DEMO_MODELS[config.model].folder_name
    folder = folder_of(config.model)
    if not folder.is_dir() and hub.is_hub_id(config.model):
        return config.model
    return folder.resolve().name


def folder_of(name: str) -> Path:
    """Return the folder that a model's name may mean; it may not exist."""
    return Path(os.path.expanduser(name))


def may_be_found(name: str) -> bool:
    """Whether this is an existing folder, a demo model, or has the form of a hub id."""
    return name in DEMO_MODELS or folder_of(name).is_dir() or hub.is_hub_id(name)


def locate_models(
    config: ModelConfig, *, on_progress: OnProgress, on_size: OnSize, dtype: str = ""
) -> ServedModels:
    """Return where the configured models are, as `locate_model` does."""
    model, draft = locate_model(config, on_progress=on_progress, on_size=on_size, dtype=dtype), None
    if config.draft_model is not None:
        asked = dataclasses.replace(config, model=config.draft_model, model_name=None)
        draft = locate_model(asked, on_progress=on_progress, on_size=on_size, dtype=dtype)
    return ServedModels(model, draft)


def locate_model(
    config: ModelConfig,
    *,
    on_progress: OnProgress,
    on_size: OnSize = lambda model, size: None,
    dtype: str = "",
) -> ModelSource:
    """Return where `config.model` is, and its name; builds (demo) or downloads (hub id) it if needed.

    `on_size` is called with the size before that, and then with the size when loaded as `dtype`. Raises
    ModelError that says what to do, and what `on_size` raises.
    """
    folder = folder_of(config.model)

    def note(size: ModelSize) -> None:
        on_size(config.model, size)

    if config.model in DEMO_MODELS:
        demo = DEMO_MODELS[config.model]
        if not is_built(demo):
            note(ModelSize(weight_bytes=0, missing_bytes=BUILT_BYTES, place=demo.folder))
        path = ensure_demo_model(demo, on_progress=on_progress)
    elif folder.is_dir():
        check_files(folder)
        path = folder
    elif hub.is_hub_id(config.model):
        path = hub.fetch(config.model, on_size=note)
    else:
        is_file = folder.is_file()
        what = f"{config.model!r} is a file" if is_file else f"there is no model folder at {config.model!r}"
        raise ModelError(
            Reason.MODEL_NOT_FOUND,
            f"{what}; name a folder with an MLX model, a hub id such as mlx-community/Qwen3-0.6B-4bit, or "
            f"one of: {', '.join(DEMO_MODELS)}",
            metadata={"model": config.model},
        )
    note(folder_size(path, dtype=dtype))
    return ModelSource(path, served_name(config), trust_remote_code=config.trust_remote_code)


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
    """Return whether images would be served for a model folder. Raises ModelError if there is no such
    folder."""
    return sight_of(path)


def find_reply_format(path: Path) -> ReplyFormatInfo | None:
    """Return how the model's replies would be parsed; None without a chat template. Raises ModelError."""
    return load_tokenizer(ModelSource(path, model_id=path.name)).reply_format


def suited(config: Config, model: ModelSource) -> Config:
    """Return the settings that suit a model: an encoder keeps no state of a text, so it needs no cache."""
    if not reads_whole(model.path):
        return config
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, enabled=False))


@dataclasses.dataclass(frozen=True, slots=True)
class ModelText:
    """What reads and writes a model's text."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler


class KeptTexts:
    """The texts of models that were opened, kept in case they are loaded again. One caller at a time.

    Reading 262,144 tokens for the compiler holds Python's lock for two seconds, and all models' tokens wait.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, ModelText]] = {}
        """By model name, with the digest of the tokenizer's files."""

    def read(self, source: ModelSource, make_compiler: Callable[[Tokenizer], GrammarCompiler]) -> ModelText:
        """Return a model's text, read again if a tokenizer file has changed. Raises ModelError."""
        digest, kept = tokenizer_digest_hex(source.path), self._kept.get(source.model_id)
        # A tokenizer with its own code may depend on any file of the folder.
        if kept is not None and kept[0] == digest and not source.trust_remote_code:
            return kept[1]
        tokenizer = load_tokenizer(source)
        text = ModelText(tokenizer, make_compiler(tokenizer))
        self._kept[source.model_id] = digest, text
        return text


def model_source(config: Config, model: ModelSource, *, dtype: str) -> ModelSource:
    """Return what to load; raises ModelError if an adapter's folder contains no adapter."""
    return dataclasses.replace(
        model,
        dtype=dtype,
        adapter_path=config.model.adapter_path,
        adapters=tuple(adapter_source(named) for named in config.model.adapters),
        context_token_limit=config.model.context_token_limit,
    )


def check_adapters(config: ModelConfig) -> None:
    """Raise ModelError for an adapter's folder without an adapter. Weights are not read."""
    for folder in map(
        Path, [*(named.path for named in config.adapters), *filter(None, [config.adapter_path])]
    ):
        read_json(folder / "adapter_config.json")
        if not any(folder.glob("adapters*.safetensors")):
            raise model_invalid(f"the adapter {folder} has no adapters.safetensors")


def adapter_source(named: NamedPath) -> AdapterSource:
    """Return an adapter of the config; raises ModelError if its folder contains none."""
    path = Path(named.path)
    if path.is_dir():
        check_files(path)
    return AdapterSource(AdapterName(named.name), path, adapter_digest(path))
