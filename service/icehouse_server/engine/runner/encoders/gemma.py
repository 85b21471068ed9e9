"""EmbeddingGemma: Gemma 3 that sees in both directions, as transformers computes it.

Of a folder whose config.json says `use_bidirectional_attention`. Its windows reach as far ahead as back.
Vera et al. 2025 (arXiv 2509.20354).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from icehouse_server.engine.runner.encoders.config_values import Config, activation_of, rope_base, size_of
from icehouse_server.engine.runner.encoders.packed import PackedTexts

_BASES: Final = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""By kind of layer: what earlier transformers call the base of its RoPE, and its default."""


class BidirectionalGemma(Module):
    """Reads packed texts. Raises ValueError for a config that it is not made for."""

    def __init__(self, config: Config, *, has_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if has_head:
            raise ValueError("a Gemma with a head that scores is not known here")
        size = self.hidden_size = size_of(config, "hidden_size")
        self.token_limit = size_of({"max_position_embeddings": 2048, **config}, "max_position_embeddings")
        self.embed_tokens = Embedding(size_of(config, "vocab_size"), size)
        pattern = size_of({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
        kinds = config.get("layer_types") or [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(size_of(config, "num_hidden_layers"))
        ]
        self.layers = [_GemmaLayer(config, kind) for kind in kinds]
        self.norm = _GemmaNorm(size, config)

    def __call__(self, token_ids: mx.array, texts: PackedTexts, token_types: mx.array) -> mx.array:
        """Return the hidden states of tokens, [tokens, size]. It has no token types."""
        x = self.embed_tokens(token_ids)
        x = x * mx.array(self.hidden_size**0.5, x.dtype)
        for layer in self.layers:
            x = layer(x, texts)
        y: mx.array = self.norm(x)
        return y

    def scores(self, hidden: mx.array, texts: PackedTexts) -> mx.array:
        """Never called: it has no head."""
        raise AssertionError("a Gemma has no head that scores")

    @staticmethod
    def renamed(weights: Mapping[str, mx.array], *, has_head: bool) -> dict[str, mx.array]:
        """Return a folder's weights by the names used here, without what is not used."""
        return {
            name.removeprefix("model."): array
            for name, array in weights.items()
            if not name.startswith("lm_head.")
        }


class _GemmaNorm(Module):
    def __init__(self, size: int, config: Config) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.zeros(size)
        self._eps = float(config.get("rms_norm_eps", 1e-6))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + self.weight, self._eps)


class _GemmaAttention(Module):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if kind not in _BASES:
            raise ValueError(f"its layer_types has {kind!r}; known are {', '.join(_BASES)}")
        size, self.head_size = size_of(config, "hidden_size"), size_of(config, "head_dim")
        head_count, kv_count = size_of(config, "num_attention_heads"), size_of(config, "num_key_value_heads")
        bias = bool(config.get("attention_bias", False))
        self.q_proj = Linear(size, head_count * self.head_size, bias=bias)
        self.k_proj = Linear(size, kv_count * self.head_size, bias=bias)
        self.v_proj = Linear(size, kv_count * self.head_size, bias=bias)
        self.o_proj = Linear(head_count * self.head_size, size, bias=bias)
        self.q_norm = _GemmaNorm(self.head_size, config)
        self.k_norm = _GemmaNorm(self.head_size, config)
        self._scale = size_of({"query_pre_attn_scalar": 256, **config}, "query_pre_attn_scalar") ** -0.5
        key, default = _BASES[kind]
        self._base = rope_base(config, kind, key=key, default=default)
        # transformers: a distance below half the window and one.
        is_local = kind == "sliding_attention"
        self._reach = size_of(config, "sliding_window") // 2 if is_local else None

    def __call__(self, x: mx.array, texts: PackedTexts) -> mx.array:
        q, k, v = (
            project(x).reshape(x.shape[0], -1, self.head_size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )

        def turn(rows: mx.array) -> mx.array:
            return mx.fast.rope(rows, self.head_size, traditional=False, base=self._base, scale=1.0, offset=0)

        gathered = texts.attend(
            self.q_norm(q), self.k_norm(k), v, scale=self._scale, reach=self._reach, turn=turn
        )
        y: mx.array = self.o_proj(gathered)
        return y


class _GemmaLayer(Module):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = size_of(config, "hidden_size")
        self.self_attn = _GemmaAttention(config, kind)
        self.mlp = _GemmaFeedForward(config)
        self.input_layernorm = _GemmaNorm(size, config)
        self.post_attention_layernorm = _GemmaNorm(size, config)
        self.pre_feedforward_layernorm = _GemmaNorm(size, config)
        self.post_feedforward_layernorm = _GemmaNorm(size, config)

    def __call__(self, x: mx.array, texts: PackedTexts) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), texts))
        y: mx.array = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return y


class _GemmaFeedForward(Module):
    def __init__(self, config: Config) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, wide = size_of(config, "hidden_size"), size_of(config, "intermediate_size")
        self.gate_proj = Linear(size, wide, bias=False)
        self.up_proj = Linear(size, wide, bias=False)
        self.down_proj = Linear(wide, size, bias=False)
        self._activation = activation_of(str(config.get("hidden_activation", "gelu_pytorch_tanh")))

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return y
