"""Adapter to mlx-vlm: models with vision, loaded whole and used in two halves.

mlx-vlm >= 0.7.10, < 0.8, from the optional extra `vision`. The text half is called as mlx-lm's models are, so
that passes treat it like any other. The tower turns an image into the vectors that replace its tokens.
`tests/unit/engine/runner/vision` fails when something that is relied on here changes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from icehouse_server.engine.core.memory_model import TowerShape, keeps_scores
from icehouse_server.engine.runner.forward.model_seam import become
from icehouse_server.engine.runner.vision.slices import TowerSlice, TowerSlicer

_BLIND_TEXTS: Final = frozenset({"mistral4"})
"""`model_type` of the text halves that are not served with images."""
_TOWER_WEIGHT: Final = re.compile(r"(.*\.)?vis(ion|ual)")
"""How the names of a vision tower's weights begin, in every maker's folders."""


def runs_images_whole(config: Mapping[str, Any]) -> bool:
    """Return whether no pass of this model may end inside an image."""
    return _FAMILIES[config["model_type"]].text_model is WholeImageTextModel


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a model folder has a vision tower that is known here."""
    return config.get("model_type") in _FAMILIES and isinstance(config.get("vision_config"), Mapping)


def refusal(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a model folder's images are not served, in words that follow its name; None if they are,
    given the extra. If there is a reason, mlx-lm reads its text."""
    if not sees(config):
        return "reads only text"
    kind = config["model_type"]
    family = _FAMILIES[kind]
    if family.is_read_by_mlx_lm and not _has_tower(path):
        return "reads only text: its folder has no vision tower weights"
    text_kind = (config.get("text_config") or {}).get("model_type")
    if family.tower is PatchTower and text_kind in _BLIND_TEXTS:
        return f"reads only text: images are not supported for a {kind} whose text model is a {text_kind}"
    feature_layer = config.get("vision_feature_layer", -1)
    if family.tower is PatchTower and not isinstance(feature_layer, int):
        return f"reads only text: vectors of several layers of its tower ({feature_layer}) are not supported"
    return None


def is_used(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether a model folder is loaded from here, because its images are served."""
    return is_installed() and refusal(path, config) is None


def is_needed(config: Mapping[str, Any]) -> bool:
    """Whether not even the text of a model folder can be served without mlx-vlm."""
    return sees(config) and not _FAMILIES[config["model_type"]].is_read_by_mlx_lm


def image_token_id(config: Mapping[str, Any]) -> int:
    """Return the token whose embeddings the tower makes."""
    token_id = config.get("image_token_id")
    return int(config["image_token_index"] if token_id is None else token_id)


def _has_tower(path: Path) -> bool:
    """Whether a folder has weights of a vision tower; mlx-lm leaves them out when it converts."""
    try:
        return any(_TOWER_WEIGHT.match(name) for name in _weight_names(path))
    except (OSError, ValueError):
        return True  # the loader will say what is wrong with it


def _weight_names(path: Path) -> Iterable[str]:
    """Yield the names of a folder's weights. Raises OSError or ValueError for damaged files."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        yield from json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            size_bytes = int.from_bytes(opened.read(8), "little")
            if size_bytes > os.fstat(opened.fileno()).st_size:
                raise ValueError(f"{file} is not a safetensors file")
            yield from json.loads(opened.read(size_bytes))


def is_installed() -> bool:
    """Whether the extra is installed; nothing of it is imported."""
    return all(importlib.util.find_spec(package) is not None for package in ("mlx_vlm", "PIL"))


def read_model(path: Path, *, lazy: bool) -> tuple[TextModel, VisionTower, dict[str, Any]]:
    """Load weights and config of a model folder. Raises what mlx-vlm raises."""
    from mlx_vlm.utils import load_config, load_model  # of an optional extra

    whole = load_model(path, lazy=lazy)
    whole.eval()
    config = dict(load_config(path))
    family, text = _FAMILIES[config["model_type"]], whole.language_model
    text_model = family.text_model
    if family.tower is PatchTower:
        if text.model_type == "ministral3":
            text_model = ScaledTextModel
        else:
            _read_rope_base(text, config.get("text_config") or {})
    return text_model(text), family.tower(whole), config


def _read_rope_base(language_model: Any, text: Mapping[str, Any]) -> None:
    """Set the base of RoPE if only `rope_parameters` has it, as transformers 5 writes it: upstream's Mistral
    does not look there."""
    rope = text.get("rope_parameters") or {}
    if text.get("rope_theta") is not None or "rope_theta" not in rope:
        return
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"its rope_parameters are of the type {rope['rope_type']!r}; only `default` is supported"
        )
    for layer in language_model.layers:
        layer.self_attn.rope.base = float(rope["rope_theta"])


class TextModel(Module):
    """The half of a model that reads tokens, called as mlx-lm's models are: with ids and caches, it returns
    logits."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.language_model = language_model

    @property
    def layers(self) -> Sequence[Any]:
        """One for each cache."""
        layers: Sequence[Any] = self.language_model.layers
        return layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache=cache).logits
        return logits

    def make_cache(self) -> list[Any]:
        """Return a cache for each layer, of mlx-vlm's classes."""
        from mlx_vlm.models.cache import make_prompt_cache  # of an optional extra

        return list(make_prompt_cache(self.language_model))


class WholeImageTextModel(TextModel):
    """For models in which each token of an image sees all of it (Gemma 3): each pass says which tokens these
    are, and masks are made for it.

    Upstream generates causally. `transformers` does not (`modeling_gemma3.create_causal_mask_mapping`): an
    image's tokens see each other in full and in window layers. That is how it was trained.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__(language_model)
        config = language_model.config
        if config.mm_tokens_per_image > config.sliding_window:
            raise ValueError(
                f"an image has {config.mm_tokens_per_image} tokens and its layers a window of "
                f"{config.sliding_window}; only images that fit into the window are supported"
            )


class GridTextModel(TextModel):
    """For models with MRoPE. Upstream keeps the positions of one prompt in the model. Here they come with
    each pass, from the view of a layer's cache; with any other cache they are those in the sequence."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        body = self.language_model.model
        hidden = body(inputs, cache=cache, position_ids=_positions(inputs, cache))
        if self.language_model.args.tie_word_embeddings:
            logits: mx.array = body.embed_tokens.as_linear(hidden)
        else:
            logits = self.language_model.lm_head(hidden)
        return logits


class ScaledTextModel(TextModel):
    """For Ministral 3, whose queries are multiplied by a factor that grows with their positions.

    Upstream uses the factor of one row's position for all rows of a pass, and waits for the device to read
    it; here each row has its own.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__(language_model)
        body = language_model.model
        become(body, "scaled", functools.partial(_scaled, body))


def _scaled(
    body: Any, call: Callable[..., Any], inputs: mx.array, cache: Any = None, inputs_embeds: Any = None
) -> mx.array:
    """Run a body as upstream's `Ministral3.__call__` does, except for the factor."""
    from mlx_vlm.models.base import create_attention_mask  # of an optional extra

    hidden = body.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
    caches = [None] * len(body.layers) if cache is None else cache
    offset = 0 if caches[0] is None else caches[0].offset
    factor = _query_factor(offset, hidden.shape[1], body.config.rope_parameters).astype(hidden.dtype)
    wide = near = create_attention_mask(hidden, caches[body.fa_idx])
    if body.swa_idx is not None:
        near = create_attention_mask(hidden, caches[body.swa_idx], window_size=body.sliding_window)
    for layer, each in zip(body.layers, caches, strict=True):
        hidden = layer(hidden, factor, near if layer.use_sliding else wide, cache=each)
    normed: mx.array = body.norm(hidden)
    return normed


def _query_factor(offset: mx.array | int, count: int, rope: Mapping[str, Any]) -> mx.array:
    """Return [rows or 1, 1, tokens, 1], like upstream's `_get_llama_4_attn_scale`; `offset` is each row's or
    all rows'."""
    positions = mx.array(offset).reshape(-1, 1) + mx.arange(count)
    steps = mx.floor(positions / rope["original_max_position_embeddings"])
    factor = 1 + rope["llama_4_scaling_beta"] * mx.log(1 + steps)
    shaped: mx.array = factor[:, None, :, None]
    return shaped


def _positions(inputs: mx.array, cache: Any) -> mx.array:
    """Return [3, batch, tokens]."""
    layer = cache[0] if cache else None
    laid = getattr(layer, "rope_positions", None)
    if laid is not None:
        return mx.expand_dims(laid, axis=-1)
    offset = layer.offset if layer is not None else 0
    return mx.broadcast_to(mx.arange(offset, offset + inputs.shape[1]), (3, *inputs.shape))


@dataclasses.dataclass(frozen=True, slots=True)
class TowerRun:
    """An image in the tower, with nothing computed yet."""

    slices: collections.deque[TowerSlice]
    """The pieces that it is computed from, in order."""
    vectors: mx.array
    """[tokens, width], computed from the last piece."""


class VisionTower:
    """The half that makes vectors of images, and puts them among those of the text between them."""

    _vectors_per_token = 1

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._slicer = TowerSlicer(whole)

    def shape(self, *, device: str) -> TowerShape:
        """Return what its temporary arrays depend on. `device` is "cpu", "metal" or "cuda"."""
        config = vars(self._whole.config.vision_config)
        # Qwen2-VL's `hidden_size` is the output's, as wide as the text half.
        hidden_size = _first(config, "embed_dim", "hidden_size")
        head_count = _first(config, "num_attention_heads", "num_heads")
        return TowerShape(
            hidden_size=hidden_size,
            feed_forward_size=config.get("intermediate_size") or round(hidden_size * config["mlp_ratio"]),
            head_count=head_count,
            patch_size=config["patch_size"],
            vector_size=self._whole.config.text_config.hidden_size * self._vectors_per_token,
            # Pixels come as float32, and in every family what follows is no narrower.
            compute_bytes=4,
            keeps_scores=keeps_scores(device=device, head_size=hidden_size // head_count, compute_bytes=4),
        )

    def modules(self) -> Sequence[Any]:
        """Return the whole model and all its modules."""
        modules: Sequence[Any] = self._whole.modules()
        return modules

    def parameters(self) -> dict[str, Any]:
        """Return the weights of the whole model except for the text half."""
        parameters = dict(self._whole.parameters())
        parameters.pop("language_model", None)
        return parameters

    def update(self, parameters: dict[str, Any]) -> None:
        """Replace weights, named as in `parameters`."""
        self._whole.update(parameters)

    def begin(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> TowerRun:
        """Build the graph that gives vectors for the tokens of one image's span.

        `tensors` are the processor's, by the names of the model's own arguments.
        """
        with self._slicer.slicing() as slices:
            vectors = self._vectors(token_ids, tensors)
        return TowerRun(slices, vectors)

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        output = self._whole.get_input_embeddings(mx.array([list(token_ids)]), **tensors)
        vectors: mx.array = output.inputs_embeds[0]
        return vectors


class ScaledTower(VisionTower):
    """For models that multiply embeddings by the root of their width before the first layer, which must not
    change an image's vectors (Gemma 3)."""

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        whole = self._whole
        dtype = whole.multi_modal_projector.mm_input_projection_weight.dtype
        pixels = tensors["pixel_values"].transpose(0, 2, 3, 1).astype(dtype)
        hidden, _, _ = whole.vision_tower(pixels, output_hidden_states=True)
        vectors: mx.array = whole.multi_modal_projector(hidden)[0]
        # Rounded like the factor that it undoes. Upstream takes the width from elsewhere in the config, or
        # 2,048 if it is not there: right for none of the models.
        factor = mx.array(whole.config.text_config.hidden_size**0.5, mx.bfloat16)
        return vectors / factor.astype(vectors.dtype)


class PatchTower(VisionTower):
    """For models in which an image keeps its shape, and rows of its tokens end with tokens of text (Pixtral,
    and Mistral 3, which merges several adjacent patches into one token).

    Upstream's call separates the images of a prompt with a mask of patches by patches, 0.6 GB for one image
    of 1,540 x 1,540 pixels. Here there is one image, and no mask. Patches are merged in a few steps, where
    upstream takes several per token.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        body = whole.vision_tower.vision_model
        self._body = body
        self._positions_per_side = body.config.image_size // body.config.patch_size
        layer_count = len(body.transformer.layers)
        # Upstream also counts the input of the first layer.
        self._layer_count = range(layer_count + 1)[whole.vision_feature_layer]

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        whole = self._whole
        ids = mx.array([list(token_ids)])
        features = self._projected(self._seen(tensors["pixel_values"]))
        text = whole.language_model.model.embed_tokens(ids)
        merged: mx.array = whole.merge_input_ids_with_image_features(
            whole.config.image_token_index, features, text, ids
        )
        return merged[0]

    def _seen(self, pixels: mx.array) -> mx.array:
        """Return [rows, columns, width] of [1, channels, height, width]."""
        body = self._body
        patches = body.patch_conv(pixels.transpose(0, 2, 3, 1).astype(body.patch_conv.weight.dtype))
        _, rows, columns, width = patches.shape
        places = mx.arange(rows)[:, None] * self._positions_per_side + mx.arange(columns)
        hidden = body.ln_pre(patches.reshape(1, rows * columns, width))
        rotation = body.patch_positional_embedding(hidden, places.flatten())
        for layer in body.transformer.layers[: self._layer_count]:
            hidden = layer(hidden, rotation)
        seen: mx.array = hidden.reshape(rows, columns, width)
        return seen

    def _projected(self, patches: mx.array) -> mx.array:
        """Return [tokens, width of the text half]."""
        projector = self._whole.multi_modal_projector
        rows, columns, width = patches.shape
        merger = getattr(projector, "patch_merger", None)
        if merger is None:
            projected: mx.array = projector(patches.reshape(rows * columns, width))
            return projected
        side = merger.spatial_merge_size
        grid = projector.norm(patches).reshape(rows // side, side, columns // side, side, width)
        # In the order of torch's `unfold`, and of upstream.
        joined = grid.transpose(0, 2, 4, 1, 3).reshape(-1, width * side * side)
        merged: mx.array = projector.linear_2(
            projector.gelu(projector.linear_1(merger.merging_layer(joined)))
        )
        return merged


class DeepstackTower(VisionTower):
    """For models in which some of the tower's layers also give vectors, for the first layers of the text half
    (DeepStack, arXiv 2406.04334): they follow the token's own, one for each layer in order.

    Upstream computes them while it puts them among those of text; a span of these models has no text.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self._vectors_per_token = 1 + len(whole.config.vision_config.deepstack_visual_indexes)

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        tower = self._whole.vision_tower
        pixels = tensors["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
        own, of_layers = tower(pixels, tensors["image_grid_thw"])
        return mx.concatenate([own, *of_layers], axis=-1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """Models whose images are served."""

    text_model: type[TextModel] = TextModel
    tower: type[VisionTower] = VisionTower
    is_read_by_mlx_lm: bool = True
    """Whether mlx-lm reads their text if the extra is missing."""


_FAMILIES: Final = {
    "gemma3": _Family(WholeImageTextModel, ScaledTower),
    "idefics3": _Family(is_read_by_mlx_lm=False),
    "lfm2-vl": _Family(),
    "lfm2_vl": _Family(is_read_by_mlx_lm=False),
    "mistral3": _Family(tower=PatchTower),
    "pixtral": _Family(tower=PatchTower),
    "qwen2_5_vl": _Family(GridTextModel),
    "qwen2_vl": _Family(GridTextModel),
    "qwen3_vl": _Family(GridTextModel, DeepstackTower),
    "smolvlm": _Family(is_read_by_mlx_lm=False),
}
"""By `model_type`."""


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next(int(config[name]) for name in names if config.get(name))
