"""Model loader: from a folder to a loaded model, its LoRA adapters and the facts about it (inference thread).

Every way in which a folder can be wrong ends in one ModelError that says what to do.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from icehouse_server.device import find_backend, find_device
from icehouse_server.domain.ids import AdapterDigest, AdapterName
from icehouse_server.domain.model import AdapterInfo, ModelInfo, ModelKind, Sight
from icehouse_server.domain.request import Pooling
from icehouse_server.engine.core.memory_model import (
    ModelShape,
    find_int,
    head_size_of,
    keeps_scores,
)
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.kv_cache.cache_classes import leaves, make_caches
from icehouse_server.engine.runner import mlx_lm
from icehouse_server.engine.runner.encoders.encoder import Encoder, encoder_classes, is_encoder
from icehouse_server.engine.runner.encoders.recipe import Gather, VectorRecipe, recipe_of
from icehouse_server.engine.runner.identity.fingerprint import quantization_of, read_json
from icehouse_server.engine.runner.identity.kv_code import KvCode
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.read_ahead import WeightReadAhead
from icehouse_server.engine.runner.vision import mlx_vlm
from icehouse_server.engine.runner.vision.mlx_vlm import VisionTower
from icehouse_server.errors import ModelError, extra_command, model_invalid
from icehouse_server.text.tokenizer import Tokenizer

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_DEFAULT_CONTEXT_TOKENS = 32_768
_SLICE_BYTES = 16 << 20
"""Bytes of weights read at once, while other models' decoding waits."""
_DISK_WAIT_S = 0.002
"""Until it asks again whether a slice has been read."""
_MISSING_EXTRA = (
    "reads images with the package mlx-vlm, which is not installed; install the extra, "
    f"{extra_command('vision')}"
)
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "n_positions", "n_ctx", "max_seq_len")


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an adapter is, and its digest when the server started."""

    name: AdapterName
    path: Path
    digest: AdapterDigest


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model is and how to load it. A `dtype` of "" means the folder's own."""

    path: Path
    model_id: str
    dtype: str = ""
    adapter_path: str | None = None
    """An adapter that is part of the model, for every request."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters that requests may choose."""
    context_token_limit: int | None = None
    trust_remote_code: bool = False
    code: KvCode | None = None
    """What the fingerprint holds of the code that computes KV; None if no block outlives the process."""


@dataclasses.dataclass(slots=True)
class LoadedModel:
    """The model object and its config.json, later merged with generation_config.json."""

    model: Any
    """The part that reads tokens; of a model with vision, its text half."""
    config: dict[str, Any]
    tower: VisionTower | None = None
    """The tower that makes vectors of images."""
    world: int = 1
    """Ranks that the model is sharded over."""
    whole_count: int = 0
    """Parameters of the whole model, if this is a share of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptedModel:
    """The model with one adapter."""

    tree: Any
    info: AdapterInfo


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of a model folder. Raises ModelError if it cannot be read."""
    if not path.is_dir():
        raise model_invalid(
            f"there is no model folder at {path}; pass --model a folder with config.json and "
            "model*.safetensors, a hub id, or `demo`"
        )
    config = read_json(
        path / "config.json",
        missing=f"{path} has no config.json, so it is not an MLX model folder; convert the model with "
        "mlx_lm.convert",
    )
    if not isinstance(config.get("model_type"), str):
        raise model_invalid(f"{path / 'config.json'} names no model_type")
    return config


def sight_of(path: Path) -> Sight:
    """Return how a model folder's images are served; raises ModelError if it is not a model folder."""
    config = read_config(path)
    if mlx_vlm.refusal(path, config) is not None:
        return Sight.NONE
    if mlx_vlm.is_installed():
        return Sight.SERVED
    return Sight.UNREADABLE if mlx_vlm.is_needed(config) else Sight.TEXT_ONLY


def sees_images(path: Path) -> bool:
    """Whether images are served for the model in a folder. Raises ModelError if not even its text can be,
    because the extra is missing."""
    sight = sight_of(path)
    if sight is Sight.UNREADABLE:
        raise model_invalid(f"the model in {path} {_MISSING_EXTRA}", metadata={"package": "mlx-vlm"})
    return sight is Sight.SERVED


def reads_whole(path: Path) -> bool:
    """Whether the model in a folder is an encoder; raises ModelError if it is not a model folder."""
    return is_encoder(read_config(path))


def needs_flat_layers(model: Any) -> bool:
    """Whether a loaded model's positions or masks depend on where images are."""
    return isinstance(model, mlx_vlm.GridTextModel | mlx_vlm.WholeImageTextModel)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load the tokenizer of a model folder; touches no mx.array, so any thread may call it."""
    config = read_config(source.path)
    eos_token_ids = read_generation_config(source.path).get("eos_token_id") or config.get("eos_token_id")
    try:
        wrapper = mlx_lm.read_tokenizer(
            source.path, eos_token_ids=eos_token_ids, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # transformers raises whatever its parsers raise
        raise _load_error(
            source, config, f"the tokenizer in {source.path} cannot be loaded", error
        ) from error
    return Tokenizer(wrapper)


def load_steps(
    source: ModelSource, *, is_hurried: Callable[[], bool], rank: Rank | None = None
) -> Steps[LoadedModel]:
    """Load weights onto the device, converted to `source.dtype` if it is named; for a `rank`, its share.

    While `is_hurried`, it yields instead of waiting for the disk.
    """
    sees = sees_images(source.path)
    tower = None
    try:
        if sees:
            model, tower, config = mlx_vlm.read_model(source.path, lazy=True)
        else:
            model, config = mlx_lm.read_model(
                source.path,
                lazy=True,
                trust_remote_code=source.trust_remote_code,
                classes=_classes_for(source.path),
            )
        if source.adapter_path:
            model = mlx_lm.read_adapter(model, source.adapter_path)
        parts: list[Any] = [part for part in (model, tower) if part is not None]
        if source.dtype:
            for part in parts:
                convert(part, source.dtype)
        whole_count = 0 if rank is None else rank.shard(model)
        model.eval()
        _forget_draws()
        yield None
        yield from _read_weights(parts, source.path, is_hurried)
    except ModelError:
        raise
    except Exception as error:  # mlx-lm has no exception tree of its own for broken folders
        config = read_config(source.path)
        raise _load_error(
            source,
            config,
            f"the model in {source.path} cannot be loaded",
            error,
            hint="; is the download complete?",
        ) from error
    if source.code is not None:
        caches = leaves(make_caches(model))
        source.code.check({type(each) for each in (*(m for part in parts for m in part.modules()), *caches)})
    return LoadedModel(model, config, tower, 1 if rank is None else rank.world, whole_count)


def _read_weights(
    parts: Iterable[Any], folder: Path, is_hurried: Callable[[], bool]
) -> Iterator[float | None]:
    """Read parameters from their files, a slice of bytes at a time."""
    waiting: list[mx.array] = []
    asked_bytes = slice_bytes = 0
    with WeightReadAhead(sorted(folder.glob("*.safetensors"))) as ahead:
        for array in (array for part in parts for _, array in parameters_of(part)):
            waiting.append(array)
            slice_bytes += array.nbytes
            if slice_bytes >= _SLICE_BYTES:
                asked_bytes += slice_bytes
                while is_hurried() and not ahead.has(asked_bytes):
                    yield _DISK_WAIT_S
                mx.eval(waiting)
                waiting, slice_bytes = [], 0
                yield None
        mx.eval(waiting)
        yield None


def _forget_draws() -> None:
    """Compute MLX's next random key. Each layer draws weights before it gets its own. Without this, the key
    keeps a record of every draw in memory: some 2 kB per layer, each time that a model is loaded."""
    mx.eval(mx.random.state)


def _classes_for(path: Path) -> mlx_lm.Classes | None:
    """Return the classes of a folder's model, if they are not those that mlx-lm finds by itself."""
    if reads_whole(path):
        return encoder_classes(path)
    recipe = recipe_of(path)
    if recipe.gather is None:
        return None
    recipe.check_steps()
    return mlx_lm.bare_classes


def _load_error(
    source: ModelSource, config: Mapping[str, Any], complaint: str, error: Exception, *, hint: str = ""
) -> ModelError:
    """Return why a folder cannot be loaded: an unknown model type, or else the library's own words."""
    is_known = is_encoder(config) or mlx_vlm.is_needed(config) or mlx_lm.knows(config)
    if "model_file" in config or is_known:
        return model_invalid(f"{complaint}: {one_line(error)}{hint}")
    kind, version = config["model_type"], importlib.metadata.version("mlx-lm")
    return model_invalid(
        f"the model in {source.path} is of the model_type {kind!r}, which the installed mlx-lm {version} "
        "does not know; serve another model, or wait for a release of Icehouse with a newer mlx-lm",
        metadata={"model_type": kind, "mlx_lm_version": version},
    )


def describe(
    loaded: LoadedModel, source: ModelSource, tokenizer: Tokenizer, fingerprint_hex: str
) -> ModelInfo:
    """Return what is known of a loaded model."""
    weights = [array for _, array in parameters_of(loaded.model)]
    if loaded.tower is not None:
        weights += [array for _, array in parameters_of(loaded.tower)]
    floating = [a.dtype for a in weights if mx.issubdtype(a.dtype, mx.floating)]
    caches, device = make_caches(loaded.model), find_device()
    context = source.context_token_limit or find_int(loaded.config, _CONTEXT_KEYS) or _DEFAULT_CONTEXT_TOKENS
    if isinstance(loaded.model, Encoder):
        context = loaded.model.context_token_limit(source.context_token_limit)
    recipe = _recipe(source.path)
    kind, pooling = _purpose(loaded.model, recipe, source.path)
    return ModelInfo(
        model_id=source.model_id,
        architecture=str(loaded.config["model_type"]),
        vocabulary_size=vocabulary_size(loaded.config, tokenizer),
        context_token_limit=int(context),
        dtype=str(floating[0]).removeprefix("mlx.core.") if floating else "unknown",
        quantization=quantization_of(loaded.config),
        parameter_count=loaded.whole_count or sum(a.size for a in weights),
        weight_bytes=sum(a.nbytes for a in weights),
        kv_bytes_per_token=0,
        cache_classes=tuple(dict.fromkeys(type(c).__name__ for c in caches)),
        fingerprint_hex=fingerprint_hex,
        has_chat_template=tokenizer.has_chat_template,
        reply_format=tokenizer.reply_format,
        eos_token_ids=tokenizer.eos_token_ids,
        device=f"{'gpu' if device.is_gpu else 'cpu'}: {device.name}",
        sees_images=loaded.tower is not None,
        runs_images_whole=loaded.tower is not None and mlx_vlm.runs_images_whole(loaded.config),
        image_refusal=mlx_vlm.refusal(source.path, loaded.config) or _MISSING_EXTRA,
        kind=kind,
        pooling=pooling,
        embedding_prompts=recipe.prompts,
    )


def _recipe(path: Path) -> VectorRecipe:
    """Return what a model's folder says about its vectors; raises ModelError."""
    try:
        return recipe_of(path)
    except (OSError, ValueError) as error:
        raise model_invalid(f"the model in {path} cannot be served: {one_line(error)}") from error


def _purpose(model: Any, recipe: VectorRecipe, path: Path) -> tuple[ModelKind, Pooling]:
    """Return what a model is for, and how its hidden states become a vector. Raises ModelError if a decoder's
    folder asks for what only encoders do here."""
    if isinstance(model, Encoder):
        return (ModelKind.RERANK if model.has_head else ModelKind.EMBEDDING), Pooling.OWN
    if recipe.gather is None:
        return ModelKind.CHAT, Pooling.LAST_TOKEN
    if recipe.dense or recipe.gather is Gather.FIRST:
        raise model_invalid(
            f"the model in {path} pools its first token or uses dense layers (modules.json), "
            "which is supported for encoders only"
        )
    is_mean = recipe.gather is Gather.MEAN
    return ModelKind.EMBEDDING, Pooling.MEAN if is_mean else Pooling.LAST_TOKEN


def vocabulary_size(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return how many token ids the model knows; its table is often larger than the tokenizer's."""
    return find_int(config, ("vocab_size",)) or tokenizer.vocabulary_size


def one_line(error: Exception) -> str:
    """Return an error's text as one line, fit for our own messages."""
    return " ".join(str(error).split())


def parameters_of(model: Any) -> list[tuple[str, mx.array]]:
    """Return all parameter arrays of a module tree, with their names."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))


def convert(model: Any, dtype_name: str) -> None:
    """Cast floating weights to a dtype; scales of quantized layers keep theirs."""
    if any(name.endswith(".scales") for name, _ in parameters_of(model)):
        return
    dtype = _DTYPES[dtype_name]

    def cast_one(array: mx.array) -> mx.array:
        is_other = mx.issubdtype(array.dtype, mx.floating) and array.dtype != dtype
        return array.astype(dtype) if is_other else array

    model.update(tree_map(cast_one, model.parameters()))


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return generation_config.json of a model folder, or {} without one; raises ModelError."""
    file = path / "generation_config.json"
    return read_json(file) if file.exists() else {}


def shape_of(loaded: LoadedModel) -> ModelShape:
    """Return what this model's temporary arrays depend on."""
    floating = [a.dtype for _, a in parameters_of(loaded.model) if mx.issubdtype(a.dtype, mx.floating)]
    compute_bytes = floating[0].size if floating else 4
    is_kept = keeps_scores(
        device=find_backend().value, head_size=head_size_of(loaded.config), compute_bytes=compute_bytes
    )
    shape = ModelShape.of(loaded.config, compute_bytes=compute_bytes, keeps_scores=is_kept)
    return dataclasses.replace(shape, head_count=max(1, shape.head_count // loaded.world))


def has_sinks(model: Any) -> bool:
    """Return whether the model's attention has sinks, logits that only take weight."""
    return any("sink" in name for name, _ in parameters_of(model))


def attach(
    adapter: AdapterSource, base: LoadedModel, source: ModelSource, *, rank: Rank | None = None
) -> AdaptedModel:
    """Load a LoRA adapter beside the model, or a `rank`'s share of it; raises ModelError if it does not fit.

    It gets its own module tree: a second tree of the same class is made from the folder, lazily, and given
    the loaded model's arrays, after sharding if the model is sharded. Nothing is in memory twice that was not
    loaded twice.
    """
    try:
        tree, _ = mlx_lm.read_model(source.path, lazy=True, trust_remote_code=source.trust_remote_code)
        if rank is None:
            tree.update(base.model.parameters())
        bare = parameters_of(tree)
        tree = mlx_lm.read_adapter(tree, str(adapter.path))
        config = read_json(adapter.path / "adapter_config.json")
        kind = str(config.get("fine_tune_type", "lora"))
        # mlx-lm accepts an adapter with fewer tensors than its layers need.
        held = cast("dict[str, mx.array]", mx.load(str(adapter.path / "adapters.safetensors")))
        missing = _own(tree, bare).keys() - held.keys()
        if missing:
            raise ValueError(f"adapters.safetensors lacks {len(missing)} tensors, such as {min(missing)}")
        if source.dtype:
            convert(tree, source.dtype)
        loaded = parameters_of(base.model)
        if rank is not None:
            rank.shard(tree, given={name: array for name, array in loaded if name not in held})
        tree.eval()
        _forget_draws()
        own = _own(tree, loaded)
        mx.eval(list(own.values()))
    except Exception as error:  # mlx-lm raises whatever a folder makes it raise
        raise model_invalid(
            f"adapter {adapter.name!r} in {adapter.path} cannot be applied to the model: {one_line(error)}; "
            "was it trained on this one?"
        ) from error
    info = AdapterInfo(
        name=adapter.name,
        kind=kind,
        digest=adapter.digest,
        parameter_count=sum(array.size for array in held.values()),
        weight_bytes=sum(array.nbytes for array in own.values()),
    )
    return AdaptedModel(tree, info)


def _own(tree: Any, others: Iterable[tuple[str, mx.array]]) -> dict[str, mx.array]:
    shared = {id(array) for _, array in others}
    return {name: array for name, array in parameters_of(tree) if id(array) not in shared}
