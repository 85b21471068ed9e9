"""Encoder: a model that makes a vector or a score of each whole text, in one pass (inference thread).

Its module tree is made for mlx-lm's loader, which reads the weights of a folder, quantized or not, and
refuses missing or unknown ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from icehouse_server.engine.runner.encoders.bert import Bert
from icehouse_server.engine.runner.encoders.config_values import activation_of
from icehouse_server.engine.runner.encoders.gemma import BidirectionalGemma
from icehouse_server.engine.runner.encoders.modernbert import ModernBert
from icehouse_server.engine.runner.encoders.packed import PackedTexts
from icehouse_server.engine.runner.encoders.recipe import Gather, VectorRecipe, has_head, recipe_of

_FAMILIES: Final[Mapping[str, type[Any]]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert"), Bert),
    "modernbert": ModernBert,
}
"""By `model_type` of config.json. A `gemma3_text` is an encoder, too, if its config says that it attends in
both directions."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a model is served as an encoder."""
    return _family_of(config) is not None


def _family_of(config: Mapping[str, Any]) -> type[Any] | None:
    if config.get("model_type") == "gemma3_text" and config.get("use_bidirectional_attention"):
        return BidirectionalGemma
    return _FAMILIES.get(str(config.get("model_type")))


def encoder_classes(folder: Path) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
    """Return a function from config to classes, with which mlx-lm's loader makes the encoder in a folder."""

    def classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
        return functools.partial(Encoder, recipe=recipe_of(folder)), _WholeConfig

    return classes


class _WholeConfig(dict[str, Any]):
    """The whole config.json, unchanged."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> _WholeConfig:
        return cls(config)


class Encoder(Module):
    """A family's body and what comes after it: pooling and dense layers, or a head that scores.

    Raises ValueError for an unknown config or recipe.
    """

    def __init__(self, config: Mapping[str, Any], *, recipe: VectorRecipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        family = _family_of(config)
        assert family is not None, "only encoders are made here"
        if config.get("is_decoder"):
            raise ValueError("its config.json says is_decoder, but it can only be served as an encoder")
        self.has_head = has_head(config)
        self.body = family(config, has_head=self.has_head)
        self._recipe = recipe
        if not self.has_head:
            recipe.check_steps()
        steps = () if self.has_head else recipe.dense
        self.dense = [Linear(step.input_size, step.output_size, bias=step.has_bias) for step in steps]
        self._activations = tuple(activation_of(step.activation) for step in steps)
        sizes = [self.body.hidden_size, *(step.output_size for step in steps)]
        for size, step in zip(sizes, steps, strict=False):
            if size != step.input_size:
                raise ValueError(f"{step.path.name} takes {step.input_size} numbers, but gets {size}")
        self.vector_size = 1 if self.has_head else sizes[-1]

    def __call__(self, texts: Sequence[Sequence[int]]) -> mx.array:
        """Return each text's vector or score, [texts, vector_size] in float32; the shortest comes first."""
        lengths = [len(text) for text in texts]
        assert lengths == sorted(lengths), lengths
        packed = PackedTexts(lengths)
        token_ids = mx.array(np.concatenate([np.asarray(text, np.int32) for text in texts]))
        hidden = self.body(
            token_ids, packed, mx.array(np.concatenate([self._types_of(text) for text in texts]))
        )
        if self.has_head:
            scores: mx.array = self.body.scores(hidden, packed).astype(mx.float32)
            return scores
        if self._recipe.gather is Gather.FIRST:
            vectors = hidden[packed.first_tokens]
        elif self._recipe.gather is Gather.LAST:
            vectors = hidden[packed.last_tokens]
        else:
            vectors = packed.sums(hidden) / packed.lengths
        for layer, activation in zip(self.dense, self._activations, strict=True):
            vectors = activation(layer(vectors.astype(hidden.dtype)))
        numbers: mx.array = vectors.astype(mx.float32)
        return numbers

    def _types_of(self, text: Sequence[int]) -> Any:
        """Return each token's type. A pair ends with its separator token; types are 1 after the first
        separator."""
        types = np.zeros(len(text), np.int32)
        if self.has_head:
            types[list(text).index(text[-1]) + 1 :] = 1
        return types

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a folder's weights under the names of this tree. Those of dense layers are in their own
        folders, or beside the others, where conversions to MLX put them."""
        own = {name: array for name, array in weights.items() if name.startswith("dense.")}
        rest = {name: array for name, array in weights.items() if name not in own}
        named = self.body.renamed(rest, has_head=self.has_head)
        found = {f"body.{name}": array for name, array in named.items()}
        for index, step in enumerate(self._recipe.dense if self.dense else ()):
            file = step.path / "model.safetensors"
            if file.exists():
                held: Any = mx.load(str(file))
                own |= {f"dense.{index}.{name.rpartition('.')[2]}": array for name, array in held.items()}
        return found | own

    def context_token_limit(self, wanted: int | None) -> int:
        """Return how long a text may be: `wanted` or the recipe's limit, but at most what the model takes."""
        most: int = self.body.token_limit
        return min(most, wanted or self._recipe.token_limit or most)

    def make_cache(self) -> list[Any]:
        """Return no caches: nothing of a text is kept."""
        return []
