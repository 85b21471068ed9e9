"""BERT and its relatives, as transformers computes them: RoBERTa, XLM-RoBERTa, CamemBERT, MPNet, DistilBERT.

They differ in names, in the first position, and in MPNet's scores, which depend on distances. Devlin et al.
2018 (arXiv 1810.04805), Liu et al. 2019 (1907.11692), Song et al. 2020 (2004.09297).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import mlx.core as mx
from mlx.nn.layers.activations import relu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from icehouse_server.engine.runner.encoders.config_values import Config, activation_of, size_of
from icehouse_server.engine.runner.encoders.packed import Bias, PackedTexts

_OFFSET_KINDS: Final = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Kinds whose positions begin after the padding token's id."""
_UNTYPED_KINDS: Final = frozenset({"mpnet", "distilbert"})
_BUCKET_COUNT: Final = 32

_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(bert|roberta|mpnet|distilbert)\.", ""),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
        (r"^embeddings\.LayerNorm\.", "norm."),
        (r"^embeddings\.(word|position|token_type)_embeddings\.", r"\1s."),
        (r"^encoder\.relative_attention_bias\.", "distances."),
        (r"^(encoder\.layer|transformer\.layer)\.", "layers."),
        (r"\.attention\.(self|attn)\.", "."),
        (r"\.attention\.(output\.)?LayerNorm\.", ".attention_norm."),
        (r"\.attention\.output\.dense\.", ".gathered."),
        (r"\.intermediate\.dense\.", ".up."),
        (r"\.output\.dense\.", ".down."),
        (r"\.output\.LayerNorm\.", ".norm."),
        # MPNet's and DistilBERT's own.
        (r"\.(attention\.)?q(_lin)?\.", ".query."),
        (r"\.(attention\.)?k(_lin)?\.", ".key."),
        (r"\.(attention\.)?v(_lin)?\.", ".value."),
        (r"\.(attention\.out_lin|o)\.", ".gathered."),
        (r"\.sa_layer_norm\.", ".attention_norm."),
        (r"\.ffn\.lin1\.", ".up."),
        (r"\.ffn\.lin2\.", ".down."),
        (r"\.output_layer_norm\.", ".norm."),
        # Heads: of BERT, of RoBERTa, of DistilBERT.
        (r"^(pooler|classifier)\.dense\.", "pooler."),
        (r"^pre_classifier\.", "pooler."),
        (r"^classifier\.out_proj\.", "classifier."),
    )
)
_UNUSED: Final = re.compile(
    r"^(cls|lm_head|vocab_transform|vocab_layer_norm|vocab_projector)\.|position_ids$"
)
_HEAD: Final = re.compile(r"^(pooler|classifier)\.")


class Bert(Module):
    """Reads packed texts. Raises ValueError for a config that it does not support."""

    def __init__(self, config: Config, *, has_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        kind = str(config["model_type"])
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"its position_embedding_type is {config['position_embedding_type']!r}")
        self.hidden_size = size_of(config, "hidden_size", "dim")
        place_count = size_of(config, "max_position_embeddings")
        padding = 1 if kind == "mpnet" else int(config.get("pad_token_id") or 0)
        self.first_position = padding + 1 if kind in _OFFSET_KINDS else 0
        self.token_limit = place_count - self.first_position
        eps = float(config.get("layer_norm_eps", 1e-12))
        self.words = Embedding(size_of(config, "vocab_size"), self.hidden_size)
        self.positions = Embedding(place_count, self.hidden_size)
        self.type_count = 0 if kind in _UNTYPED_KINDS else size_of(config, "type_vocab_size")
        if self.type_count:
            self.token_types = Embedding(self.type_count, self.hidden_size)
        self.norm = LayerNorm(self.hidden_size, eps=eps)
        self.layers = [_BertLayer(config, self.hidden_size, eps=eps) for _ in range(_layer_count(config))]
        if kind == "mpnet":
            if config.get("relative_attention_num_buckets", _BUCKET_COUNT) != _BUCKET_COUNT:
                raise ValueError(f"its relative_attention_num_buckets must be {_BUCKET_COUNT}")
            self.distances = Embedding(_BUCKET_COUNT, self.layers[0].head_count)
        if has_head:
            # Vectors are not made with a pooler alone.
            self.pooler = Linear(self.hidden_size, self.hidden_size)
            self.classifier = Linear(self.hidden_size, 1)
        self._head_activation = relu if kind == "distilbert" else mx.tanh

    def __call__(self, token_ids: mx.array, texts: PackedTexts, token_types: mx.array) -> mx.array:
        """Return the hidden states of tokens, [tokens, size]. `token_types` are 0, or 1 for the second text
        of a pair."""
        x = self.words(token_ids) + self.positions(texts.positions + self.first_position)
        if self.type_count:
            x = x + self.token_types(mx.minimum(token_types, self.type_count - 1))
        x = self.norm(x)
        bias = self._distance_bias if "distances" in self else None
        for layer in self.layers:
            x = layer(x, texts, bias)
        hidden: mx.array = x
        return hidden

    def scores(self, hidden: mx.array, texts: PackedTexts) -> mx.array:
        """Return the head's score of each text, [texts, 1]."""
        first = self._head_activation(self.pooler(hidden[texts.first_tokens]))
        scores: mx.array = self.classifier(first)
        return scores

    def _distance_bias(self, distances: mx.array) -> mx.array:
        bias: mx.array = self.distances(_buckets(distances)).transpose(2, 0, 1)
        return bias

    @staticmethod
    def renamed(weights: Mapping[str, mx.array], *, has_head: bool) -> dict[str, mx.array]:
        """Return a folder's weights under the names used here, without unused ones."""
        found = {}
        for name, array in weights.items():
            for pattern, replacement in _NAMES:
                name = pattern.sub(replacement, name)
            if _UNUSED.search(name) or (_HEAD.match(name) and not has_head):
                continue
            if name in found:
                raise ValueError(f"two of its tensors are {name}")
            found[name] = array
        return found


class _BertLayer(Module):
    def __init__(self, config: Config, hidden_size: int, *, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.head_count = size_of(config, "num_attention_heads", "n_heads")
        if hidden_size % self.head_count:
            raise ValueError(f"its hidden_size {hidden_size} is not a multiple of {self.head_count} heads")
        wide = size_of(config, "intermediate_size", "hidden_dim")
        self.query = Linear(hidden_size, hidden_size)
        self.key = Linear(hidden_size, hidden_size)
        self.value = Linear(hidden_size, hidden_size)
        self.gathered = Linear(hidden_size, hidden_size)
        self.attention_norm = LayerNorm(hidden_size, eps=eps)
        self.up = Linear(hidden_size, wide)
        self.down = Linear(wide, hidden_size)
        self.norm = LayerNorm(hidden_size, eps=eps)
        self._activation = activation_of(str(config.get("hidden_act") or config.get("activation") or "gelu"))

    def __call__(self, x: mx.array, texts: PackedTexts, bias: Bias | None) -> mx.array:
        q, k, v = (
            project(x).reshape(x.shape[0], self.head_count, -1)
            for project in (self.query, self.key, self.value)
        )
        gathered = texts.attend(q, k, v, scale=q.shape[-1] ** -0.5, bias=bias)
        x = self.attention_norm(self.gathered(gathered) + x)
        y: mx.array = self.norm(self.down(self._activation(self.up(x))) + x)
        return y


def _layer_count(config: Config) -> int:
    return size_of(config, "num_hidden_layers", "n_layers")


def _buckets(distances: mx.array) -> mx.array:
    """Return the bucket of each distance: 8 for single distances to either side, then 8 that widen up to 128.

    Bucket 8 + i begins at the least n with log(n / 8) / log(128 / 8) * 8 >= i, so n * n >= 64 * 2**i.
    """
    count = _BUCKET_COUNT // 2
    far = mx.abs(distances)
    borders = mx.array([64 << i for i in range(1, count // 2)])
    large = count // 2 + mx.sum((far * far)[..., None] >= borders, axis=-1)
    own = mx.where(far < count // 2, far, large)
    return own + count * (distances > 0)
