"""Adapter to mlx-vlm: models that see, loaded whole and used in two halves.

mlx-vlm >= 0.7.10, < 0.8, of the optional extra `vision`. The half that reads tokens is called as mlx-lm's
models are, so that passes treat it like any; the tower makes of an image the vectors that stand in the place
of its tokens. `tests/unit/engine/runner/vision` fails when what is relied on here moves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

FAMILIES: Final = frozenset({"idefics3", "smolvlm", "qwen2_5_vl"})
"""`model_type` of the models whose images are served."""
_GRID_FAMILIES: Final = frozenset({"qwen2_5_vl"})
"""Those whose positions tell the rows and columns of an image."""


_READ_BY_MLX_LM: Final = frozenset({"qwen2_5_vl"})
"""Those whose text mlx-lm reads too."""


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
    return int(config["image_token_id"])


def is_installed() -> bool:
    """Whether mlx-vlm is there; nothing of it is imported."""
    return importlib.util.find_spec("mlx_vlm") is not None


def read_model(path: Path, *, lazy: bool) -> tuple[TextModel, VisionTower, dict[str, Any]]:
    """Load weights and config of a model folder. Raises what mlx-vlm raises."""
    from mlx_vlm.utils import load_config, load_model  # of an optional extra

    whole = load_model(path, lazy=lazy)
    whole.eval()
    config = dict(load_config(path))
    text_model = GridTextModel if config["model_type"] in _GRID_FAMILIES else TextModel
    return text_model(whole.language_model), VisionTower(whole), config


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


class VisionTower:
    """The half that makes vectors of images, and puts them among those of the text that is between them."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def parameters(self) -> dict[str, Any]:
        """Return the weights of the whole model but for the half that reads tokens."""
        found = dict(self._whole.parameters())
        found.pop("language_model", None)
        return found

    def update(self, parameters: dict[str, Any]) -> None:
        """Replace weights, which are named as `parameters` names them."""
        self._whole.update(parameters)

    def encode(self, token_ids: Sequence[int], tensors: Mapping[str, mx.array]) -> mx.array:
        """Return vectors for the tokens of one image's span, [tokens, width], not computed yet.

        `tensors` are the processor's, by the names of the model's own arguments.
        """
        found = self._whole.get_input_embeddings(mx.array([list(token_ids)]), **tensors)
        vectors: mx.array = found.inputs_embeds[0]
        return vectors
