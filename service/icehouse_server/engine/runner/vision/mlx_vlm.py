"""Adapter to mlx-vlm: models that see, loaded whole and used in two halves.

mlx-vlm >= 0.7.10, < 0.8, of the optional extra `vision`. The half that reads tokens is called as mlx-lm's
models are, so that passes treat it like any; the tower makes of an image the vectors that stand in the place
of its tokens. `tests/unit/engine/runner/vision` fails when what is relied on here moves.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from icehouse_server.engine.core.memory_model import TowerShape, keeps_scores
from icehouse_server.engine.runner.forward.model_seam import become

FAMILIES: Final = frozenset(
    {"idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "lfm2_vl", "lfm2-vl"}
)
"""`model_type` of the models whose images are served."""
_GRID_FAMILIES: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Those whose positions tell the rows and columns of an image."""
_READ_BY_MLX_LM: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "lfm2-vl"})
"""Those whose text mlx-lm reads too."""
_DEEPSTACK_FAMILIES: Final = frozenset({"qwen3_vl"})
"""Those whose towers give vectors for the first layers too."""
_WHOLE_IMAGE_FAMILIES: Final = frozenset({"gemma3"})
"""Those in which each token of an image sees all of it."""
_TOWER_LAYER: Final = re.compile(r"(?!language_model\.).*\b(layers|blocks)\.\d+$")
"""What mlx-vlm's vision towers call the layers that images go through one after another."""


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a model folder has a vision tower that is known here."""
    return config.get("model_type") in FAMILIES and isinstance(config.get("vision_config"), Mapping)


def is_used(config: Mapping[str, Any]) -> bool:
    """Whether a model folder is loaded from here: its images are served."""
    return sees(config) and is_installed()


def is_needed(config: Mapping[str, Any]) -> bool:
    """Whether a model folder cannot be served without mlx-vlm, not even its text."""
    return sees(config) and config["model_type"] not in _READ_BY_MLX_LM


def image_token_id(config: Mapping[str, Any]) -> int:
    """Return the token whose embeddings the tower makes."""
    found = config.get("image_token_id")
    return int(config["image_token_index"] if found is None else found)


def is_installed() -> bool:
    """Whether the extra is there; nothing of it is imported."""
    return all(importlib.util.find_spec(package) is not None for package in ("mlx_vlm", "PIL"))


def read_model(path: Path, *, lazy: bool) -> tuple[TextModel, VisionTower, dict[str, Any]]:
    """Load weights and config of a model folder. Raises what mlx-vlm raises."""
    from mlx_vlm.utils import load_config, load_model  # of an optional extra

    whole = load_model(path, lazy=lazy)
    whole.eval()
    config = dict(load_config(path))
    kind = config["model_type"]
    if kind in _WHOLE_IMAGE_FAMILIES:
        return WholeImageTextModel(whole.language_model), ScaledTower(whole), config
    text_model = GridTextModel if kind in _GRID_FAMILIES else TextModel
    tower = DeepstackTower if kind in _DEEPSTACK_FAMILIES else VisionTower
    return text_model(whole.language_model), tower(whole), config


class TextModel(Module):
    """The half of a model that reads tokens, as mlx-lm's models are: called with ids and caches, it gives
    logits."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.language_model = language_model

    @property
    def layers(self) -> Sequence[Any]:
        """One for each cache."""
        found: Sequence[Any] = self.language_model.layers
        return found

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.language_model(inputs, cache=cache).logits
        return logits

    def make_cache(self) -> list[Any]:
        """Return a cache for each layer, of mlx-vlm's classes."""
        from mlx_vlm.models.cache import make_prompt_cache  # of an optional extra

        return list(make_prompt_cache(self.language_model))


class WholeImageTextModel(TextModel):
    """The same of models in which each token of an image sees all of it (Gemma 3): which tokens these are
    comes with each pass, and masks are made for it.

    Upstream generates causally. `transformers` does not (`modeling_gemma3.create_causal_mask_mapping`): in
    full layers and in those with a window an image's tokens see each other. That is what was trained.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__(language_model)
        config = language_model.config
        if config.mm_tokens_per_image > config.sliding_window:
            raise ValueError(
                f"an image has {config.mm_tokens_per_image} tokens and its layers a window of "
                f"{config.sliding_window}; only images that fit into the window are served"
            )


class GridTextModel(TextModel):
    """The same of models with MRoPE. Upstream keeps the positions of one prompt in the model; here they come
    with each pass, from the view of a layer's cache, and are those in the sequence for any other cache."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        body = self.language_model.model
        hidden = body(inputs, cache=cache, position_ids=_positions(inputs, cache))
        if self.language_model.args.tie_word_embeddings:
            logits: mx.array = body.embed_tokens.as_linear(hidden)
        else:
            logits = self.language_model.lm_head(hidden)
        return logits


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
    """An image in the tower, nothing of which is computed yet."""

    layers: collections.deque[mx.array]
    """What its layers give, the first one's first: each is computed from the one before it."""
    vectors: mx.array
    """[tokens, width], computed from the last layer."""


class VisionTower:
    """The half that makes vectors of images, and puts them among those of the text that is between them."""

    _vectors_per_token = 1

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._layers: collections.deque[mx.array] | None = None
        """What layers give while a run is built."""
        for name, module in whole.named_modules():
            if _TOWER_LAYER.match(name):
                become(module, "tower", _recording)
                object.__setattr__(module, "_forward_tower", self)

    def shape(self, *, device: str) -> TowerShape:
        """Return what its temporary arrays are made of. `device` is "cpu", "metal" or "cuda"."""
        found = vars(self._whole.config.vision_config)
        # Qwen2-VL's `hidden_size` is what comes out, as wide as the other half.
        hidden_size = _first(found, "embed_dim", "hidden_size")
        head_count = _first(found, "num_attention_heads", "num_heads")
        return TowerShape(
            hidden_size=hidden_size,
            feed_forward_size=found.get("intermediate_size") or round(hidden_size * found["mlp_ratio"]),
            head_count=head_count,
            patch_size=found["patch_size"],
            vector_size=self._whole.config.text_config.hidden_size * self._vectors_per_token,
            # Pixels come as float32, and nothing behind them is narrower in every family.
            compute_bytes=4,
            keeps_scores=keeps_scores(device=device, head_size=hidden_size // head_count, compute_bytes=4),
        )

    def parameters(self) -> dict[str, Any]:
        """Return the weights of the whole model but for the half that reads tokens."""
        found = dict(self._whole.parameters())
        found.pop("language_model", None)
        return found

    def update(self, parameters: dict[str, Any]) -> None:
        """Replace weights, which are named as `parameters` names them."""
        self._whole.update(parameters)

    def begin(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> TowerRun:
        """Build what gives vectors for the tokens of one image's span.

        `tensors` are the processor's, by the names of the model's own arguments.
        """
        layers: collections.deque[mx.array] = collections.deque()
        self._layers = layers
        try:
            vectors = self._vectors(token_ids, tensors)
        finally:
            self._layers = None
        return TowerRun(layers, vectors)

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        found = self._whole.get_input_embeddings(mx.array([list(token_ids)]), **tensors)
        vectors: mx.array = found.inputs_embeds[0]
        return vectors

    def note_layer(self, output: mx.array) -> None:
        """Take what a layer gives, where a run is built."""
        if self._layers is not None:
            self._layers.append(output)


class ScaledTower(VisionTower):
    """The same where embeddings are multiplied by the root of their width before the first layer, and an
    image's vectors are not to be (Gemma 3)."""

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        whole = self._whole
        dtype = whole.multi_modal_projector.mm_input_projection_weight.dtype
        pixels = tensors["pixel_values"].transpose(0, 2, 3, 1).astype(dtype)
        hidden, _, _ = whole.vision_tower(pixels, output_hidden_states=True)
        vectors: mx.array = whole.multi_modal_projector(hidden)[0]
        # Rounded as the factor is that it undoes. Upstream takes the width from another place of the config,
        # 2,048 where that says nothing: right for none of the models.
        factor = mx.array(whole.config.text_config.hidden_size**0.5, mx.bfloat16)
        return vectors / factor.astype(vectors.dtype)


class DeepstackTower(VisionTower):
    """The same where some of its layers give vectors too, for the first layers of the other half (DeepStack,
    arXiv 2406.04334): they lie behind the token's own, one for each layer in order.

    Upstream computes these at once where it puts them among those of text; a span of these models has none.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self._vectors_per_token = 1 + len(whole.config.vision_config.deepstack_visual_indexes)

    def _vectors(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        tower = self._whole.vision_tower
        pixels = tensors["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
        own, of_layers = tower(pixels, tensors["image_grid_thw"])
        return mx.concatenate([own, *of_layers], axis=-1)


def _recording(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        self._forward_tower.note_layer(output)
        return output

    return run


def _first(found: Mapping[str, Any], *names: str) -> int:
    return next(int(found[name]) for name in names if found.get(name))
