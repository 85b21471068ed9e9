"""ModernBERT, as transformers computes it: RoPE, gated feed-forward, windows in most layers.

Warner et al. 2024 (arXiv 2412.13663).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Identity, Linear
from mlx.nn.layers.normalization import LayerNorm

from icehouse_server.engine.runner.encoders.config_values import Config, activation_of, rope_base, size_of
from icehouse_server.engine.runner.encoders.packed import PackedTexts

_BASES: Final = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
"""By kind of layer: the key of its RoPE base in earlier transformers, and its default."""
_NAMES: Final = (
    ("embeddings.tok_embeddings.", "words."),
    ("embeddings.norm.", "norm."),
    (".attn.Wqkv.", ".qkv."),
    (".attn.Wo.", ".gathered."),
    (".mlp.Wi.", ".up."),
    (".mlp.Wo.", ".down."),
    ("head.dense.", "dense."),
    ("head.norm.", "head_norm."),
)
_POOLINGS: Final = ("cls", "mean")


class ModernBert(Module):
    """Reads packed texts. Raises ValueError for a config that it does not support."""

    def __init__(self, config: Config, *, has_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = self.hidden_size = size_of(config, "hidden_size")
        self.token_limit = size_of(config, "max_position_embeddings")
        self.words = Embedding(size_of(config, "vocab_size"), size)
        self.norm = _norm(config)
        every = size_of({"global_attn_every_n_layers": 3, **config}, "global_attn_every_n_layers")
        kinds = config.get("layer_types") or [
            "sliding_attention" if index % every else "full_attention"
            for index in range(size_of(config, "num_hidden_layers"))
        ]
        self.layers = [_ModernLayer(config, kind, is_first=not index) for index, kind in enumerate(kinds)]
        self.final_norm = _norm(config)
        self._pooling = str(config.get("classifier_pooling", "cls"))
        if has_head:
            if self._pooling not in _POOLINGS:
                raise ValueError(f"its classifier_pooling is {self._pooling!r}; supported are {_POOLINGS}")
            self.dense = Linear(size, size, bias=bool(config.get("classifier_bias", False)))
            self.head_norm = _norm(config)
            self.classifier = Linear(size, 1)
            self._head_activation = activation_of(str(config.get("classifier_activation", "gelu")))

    def __call__(self, token_ids: mx.array, texts: PackedTexts, token_types: mx.array) -> mx.array:
        """Return the hidden states of tokens, [tokens, size]. Token types are not used."""
        x = self.norm(self.words(token_ids))
        for layer in self.layers:
            x = layer(x, texts)
        y: mx.array = self.final_norm(x)
        return y

    def scores(self, hidden: mx.array, texts: PackedTexts) -> mx.array:
        """Return the head's score of each text, [texts, 1]."""
        pooled = hidden[texts.first_tokens]
        if self._pooling == "mean":
            pooled = (texts.sums(hidden) / texts.lengths).astype(hidden.dtype)
        scores: mx.array = self.classifier(self.head_norm(self._head_activation(self.dense(pooled))))
        return scores

    @staticmethod
    def renamed(weights: Mapping[str, mx.array], *, has_head: bool) -> dict[str, mx.array]:
        """Return a folder's weights under the names used here, without unused ones."""
        found = {}
        for name, array in weights.items():
            name = name.removeprefix("model.")
            is_head = name.startswith(("head.", "classifier."))
            for theirs, own in _NAMES:
                name = name.replace(theirs, own)
            if not name.startswith("decoder.") and (has_head or not is_head):
                found[name] = array
        return found


class _ModernLayer(Module):
    def __init__(self, config: Config, kind: str, *, is_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if kind not in _BASES:
            raise ValueError(f"its layer_types has {kind!r}; supported are {', '.join(_BASES)}")
        size = size_of(config, "hidden_size")
        self.head_count = size_of(config, "num_attention_heads")
        if size % self.head_count:
            raise ValueError(f"its hidden_size {size} is not a multiple of {self.head_count} heads")
        attention_bias, wide_bias = (bool(config.get(key)) for key in ("attention_bias", "mlp_bias"))
        wide = size_of(config, "intermediate_size")
        self.attn_norm = Identity() if is_first else _norm(config)
        self.qkv = Linear(size, 3 * size, bias=attention_bias)
        self.gathered = Linear(size, size, bias=attention_bias)
        self.mlp_norm = _norm(config)
        self.up = Linear(size, 2 * wide, bias=wide_bias)
        self.down = Linear(wide, size, bias=wide_bias)
        self._activation = activation_of(str(config.get("hidden_activation", "gelu")))
        key, default = _BASES[kind]
        self._base = rope_base(config, kind, key=key, default=default)
        is_local = kind == "sliding_attention"
        self._reach = (
            size_of({"local_attention": 128, **config}, "local_attention") // 2 if is_local else None
        )

    def __call__(self, x: mx.array, texts: PackedTexts) -> mx.array:
        qkv = self.qkv(self.attn_norm(x)).reshape(x.shape[0], 3, self.head_count, -1)
        size = qkv.shape[-1]

        def turn(rows: mx.array) -> mx.array:
            return mx.fast.rope(rows, size, traditional=False, base=self._base, scale=1.0, offset=0)

        gathered = texts.attend(
            qkv[:, 0], qkv[:, 1], qkv[:, 2], scale=size**-0.5, reach=self._reach, turn=turn
        )
        x = x + self.gathered(gathered)
        opened, gate = mx.split(self.up(self.mlp_norm(x)), 2, axis=-1)
        y: mx.array = x + self.down(self._activation(opened) * gate)
        return y


def _norm(config: Config) -> Any:
    return LayerNorm(
        size_of(config, "hidden_size"),
        eps=float(config.get("norm_eps", 1e-5)),
        bias=bool(config.get("norm_bias", False)),
    )
