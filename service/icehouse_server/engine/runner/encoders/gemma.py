"""EmbeddingGemma: Gemma 3 attending in both directions, as transformers computes it.

Used if config.json says `use_bidirectional_attention`. Its layers are mlx-lm's, but attend to packed texts
here; their windows reach as far ahead as back. Vera et al. 2025 (arXiv 2509.20354).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.gemma3_text import Gemma3Model, ModelArgs

from icehouse_server.engine.runner.encoders.config_values import Config, rope_base, size_of
from icehouse_server.engine.runner.encoders.packed import PackedTexts

_BASES: Final = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""By kind of layer: the key of its RoPE base in earlier transformers, and its default."""
_ACTIVATION: Final = "gelu_pytorch_tanh"


class BidirectionalGemma(Module):
    """Reads packed texts. Raises ValueError for a config that it does not support."""

    def __init__(self, config: Config, *, has_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if has_head:
            raise ValueError("a Gemma with a classification head is not supported")
        if config.get("hidden_activation", _ACTIVATION) != _ACTIVATION:
            raise ValueError(f"its hidden_activation is {config['hidden_activation']!r}, not {_ACTIVATION}")
        self.hidden_size = size_of(config, "hidden_size")
        self.token_limit = size_of({"max_position_embeddings": 2048, **config}, "max_position_embeddings")
        self.model: Any = Gemma3Model(ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
        pattern = size_of({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
        kinds = config.get("layer_types") or [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(size_of(config, "num_hidden_layers"))
        ]
        layers: list[Any] = self.model.layers
        for layer, kind in zip(layers, kinds, strict=True):
            layer.self_attn = _PackedAttention(layer.self_attn, config, kind)

    def __call__(self, token_ids: mx.array, texts: PackedTexts, token_types: mx.array) -> mx.array:
        """Return the hidden states of tokens, [tokens, size]. Token types are not used."""
        x = self.model.embed_tokens(token_ids)
        x = x * mx.array(self.hidden_size**0.5, x.dtype)
        for layer in self.model.layers:
            x = layer(x, texts)
        y: mx.array = self.model.norm(x)
        return y

    def scores(self, hidden: mx.array, texts: PackedTexts) -> mx.array:
        """Never called, since this model has no head."""
        raise AssertionError("a Gemma has no head that scores")

    @staticmethod
    def renamed(weights: Mapping[str, mx.array], *, has_head: bool) -> dict[str, mx.array]:
        """Return a folder's weights under the names used here, without unused ones."""
        return {
            f"model.{name.removeprefix('model.')}": array
            for name, array in weights.items()
            if not name.startswith("lm_head.")
        }


class _PackedAttention(Module):
    """The attention of one of mlx-lm's layers, which passes it texts in place of a mask."""

    def __init__(self, own: Any, config: Config, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if kind not in _BASES:
            raise ValueError(f"its layer_types has {kind!r}; supported are {', '.join(_BASES)}")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = own.q_proj, own.k_proj, own.v_proj, own.o_proj
        self.q_norm, self.k_norm = own.q_norm, own.k_norm
        self._head_size, self._scale = own.head_dim, own.scale
        key, default = _BASES[kind]
        self._base = rope_base(config, kind, key=key, default=default)
        # As in transformers, distances below half the window plus one are seen.
        self._reach = size_of(config, "sliding_window") // 2 if kind == "sliding_attention" else None

    def __call__(self, x: mx.array, texts: PackedTexts, cache: None) -> mx.array:
        size, base = self._head_size, self._base
        q, k, v = (
            project(x).reshape(x.shape[0], -1, size) for project in (self.q_proj, self.k_proj, self.v_proj)
        )

        def turn(rows: mx.array) -> mx.array:
            return mx.fast.rope(rows, size, traditional=False, base=base, scale=1.0, offset=0)

        gathered = texts.attend(
            self.q_norm(q), self.k_norm(k), v, scale=self._scale, reach=self._reach, turn=turn
        )
        y: mx.array = self.o_proj(gathered)
        return y
