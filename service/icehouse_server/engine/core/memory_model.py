"""Memory model: estimates the device memory that a request needs.

Pure arithmetic over facts about the model: the runner measures, this predicts. Sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from icehouse_server.domain.request import ImageInput

_METAL_HEAD_SIZES = (64, 72, 80, 96, 128)
_CUDA_HEAD_SIZE_LIMIT = 128
_NESTED = ("text_config", "language_config", "llm_config")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_SIZE = ("head_dim", "attention_head_dim", "head_size")
_FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "ffn_hidden_size")
_VOCABULARY = ("vocab_size", "padded_vocab_size", "n_vocab")
_LIVE_FEED_FORWARD_COPIES = 4
"""Gate, up, their product, and one more during the computation."""
_LIVE_HIDDEN_COPIES = 20
"""Residual, norm, q, k, v, attention out and feed-forward out, counted more than twice, because attention is
often twice as wide as the hidden size and a convolution computes three parts at once."""
_LIVE_LOGIT_COPIES = 5
"""Logits, their float32 copy, its negative, and the order that finds the likeliest ones."""
_SCORE_COPIES = 2
"""Attention scores and their softmax, if the kernel writes them out."""
_GROWING_LAYERS = 2
"""Layers whose KV exists twice while a cache grows: one is copied at a time, and in hybrids only some layers
have KV. Without this, estimates were as low as 0.4 of the peak while a cache grew. With it they are at least
1.2 times the peak, and up to 6 times while nothing grows (llama, lfm2 and gemma3 of width 256; chunks of 32,
72 and 128 tokens; contexts up to 640; mlx 0.32.4, x86)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's temporary arrays depend on. Counts, and `compute_bytes` per activation value."""

    hidden_size: int
    layer_count: int
    head_count: int
    feed_forward_size: int
    vocabulary_size: int
    compute_bytes: int
    keeps_scores: bool
    """Whether the device's attention writes out its scores, chunk x context (MLX's CPU build does)."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, compute_bytes: int, keeps_scores: bool) -> ModelShape:
        """Read config.json, also nested text configs and old names. Missing facts become 0 or guesses."""
        hidden = find_int(config, _HIDDEN) or 0
        return cls(
            hidden_size=hidden,
            layer_count=find_int(config, _LAYERS) or 0,
            head_count=find_int(config, _HEADS) or 1,
            feed_forward_size=find_int(config, _FEED_FORWARD) or 4 * hidden,
            vocabulary_size=find_int(config, _VOCABULARY) or 0,
            compute_bytes=compute_bytes,
            keeps_scores=keeps_scores,
        )


def head_size_of(config: Mapping[str, Any]) -> int:
    """Return the width of an attention head according to config.json; 0 if it does not say."""
    return find_int(config, _HEAD_SIZE) or (find_int(config, _HIDDEN) or 0) // (find_int(config, _HEADS) or 1)


def keeps_scores(*, device: str, head_size: int, compute_bytes: int) -> bool:
    """Return whether attention over a chunk writes out its scores, for lack of a fused kernel.

    As of MLX 0.32, Metal has one for head sizes of 64, 72, 80, 96 and 128, CUDA (cuDNN) for multiples of 8 up
    to 128 in 16 bits, the CPU none. `device` is "cpu", "metal" or "cuda"; a `head_size` of 0 is unknown.
    """
    if device == "metal":
        return head_size not in _METAL_HEAD_SIZES
    if device == "cuda":
        return compute_bytes != 2 or not 0 < head_size <= _CUDA_HEAD_SIZE_LIMIT or head_size % 8 != 0
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class TowerShape:
    """What the temporary arrays of a vision tower, which runs layer by layer, depend on. Counts."""

    hidden_size: int
    feed_forward_size: int
    head_count: int
    patch_size: int
    """Side length in pixels."""
    vector_size: int
    """Values per token that it produces."""
    compute_bytes: int
    keeps_scores: bool

    def encode_bytes(self, image: ImageInput) -> int:
        """Return the peak of temporary arrays while an image is encoded, its tensors and vectors included."""
        tile_count, patch_count = self._patches(image.pixels.shape)
        values = tile_count * patch_count * _LIVE_HIDDEN_COPIES * self.hidden_size
        values += tile_count * patch_count * _LIVE_FEED_FORWARD_COPIES * self.feed_forward_size
        if self.keeps_scores:
            values += _SCORE_COPIES * self.head_count * tile_count * patch_count**2
        values += image.feature_count * self.vector_size
        return values * self.compute_bytes + image.size_bytes

    def _patches(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many runs of patches an image has, and how many patches of a run attend to each other.
        The shape is [..., channels, height, width] for pixels in tiles, or [runs, patches, values]."""
        if len(shape) < 4:
            return math.prod(shape[:-2]), shape[-2]
        height, width = shape[-2:]
        return math.prod(shape[:-3]), (height // self.patch_size) * (width // self.patch_size)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftFootprint:
    """What a draft model takes: once, and for each token of a sequence that uses it."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryModel:
    """What KV and temporary arrays of one model take."""

    shape: ModelShape
    kv_bytes_per_token: int
    """Over all layers of unlimited context, as measured on the first tokens."""
    fixed_bytes_per_sequence: int
    """Full windows, and recurrent states."""
    room_step_token_count: int = 1
    """Room for a sequence grows in steps of so many tokens: a page, or the step of mlx-lm's arrays."""
    copies_to_grow: bool = False
    """Whether growing copies: arrays are copied, pages are not."""
    pool_bytes: int = 0
    """Size of a pool that was allocated at once for all KV; 0 if it grows."""
    attended_bytes_per_token: int = 0
    """Bytes that attention in one layer allocates for the KV that it reads, per token of context."""
    draft: DraftFootprint = DraftFootprint()
    tower: TowerShape | None = None
    """The tower that encodes images, if the model has one."""

    @classmethod
    def by_config(cls, config: Mapping[str, Any], *, compute_bytes: int, device: str) -> MemoryModel:
        """Return an estimate from config.json before the model is loaded: never too low if all layers keep
        every token, and too high if some do not."""
        head_size = head_size_of(config)
        is_kept = keeps_scores(device=device, head_size=head_size, compute_bytes=compute_bytes)
        shape = ModelShape.of(config, compute_bytes=compute_bytes, keeps_scores=is_kept)
        kv_head_count = find_int(config, _KV_HEADS) or shape.head_count
        return cls(
            shape,
            kv_bytes_per_token=2 * shape.layer_count * kv_head_count * head_size * compute_bytes,
            fixed_bytes_per_sequence=0,
        )

    def image_bytes(self, image: ImageInput) -> int:
        """Return the peak memory of encoding an image, its vectors included."""
        return 0 if self.tower is None else self.tower.encode_bytes(image)

    def kv_bytes(self, token_count: int) -> int:
        """Return what a sequence of so many tokens holds."""
        return self.kv_bytes_per_token * self._room(token_count) + self.fixed_bytes_per_sequence

    def growth_bytes(self, *, chunk_token_count: int, context_token_count: int) -> int:
        """Return how much KV grows for a chunk that ends at this context, copies included.

        Every chunk writes windows and states anew, beside the old ones.
        """
        after = self._room(context_token_count)
        added = after - self._room(context_token_count - chunk_token_count)
        if self.copies_to_grow:  # by whole steps after the existing tokens, wherever these end
            added = self._room(chunk_token_count)
            added += min(after, _GROWING_LAYERS * after // max(1, self.shape.layer_count))
        return self.kv_bytes_per_token * added + self.fixed_bytes_per_sequence

    def _room(self, token_count: int) -> int:
        return -(-token_count // self.room_step_token_count) * self.room_step_token_count

    def chunk_bytes(self, *, chunk_token_count: int, context_token_count: int) -> int:
        """Return the peak of temporary arrays while a chunk runs at this context length."""
        shape = self.shape
        size_bytes = chunk_token_count * self._activation_bytes
        if shape.keeps_scores:
            score_count = shape.head_count * chunk_token_count * context_token_count
            size_bytes += _SCORE_COPIES * score_count * shape.compute_bytes
        return size_bytes + self.attended_bytes_per_token * context_token_count

    def pass_token_count(self, *, budget_bytes: int) -> int:
        """Return for how many tokens, of several chunks, the activations of one pass fit the budget."""
        return budget_bytes // max(1, self._activation_bytes)

    @property
    def _activation_bytes(self) -> int:
        """Activations of one token in a layer."""
        shape = self.shape
        values = _LIVE_HIDDEN_COPIES * shape.hidden_size + _LIVE_FEED_FORWARD_COPIES * shape.feed_forward_size
        return values * shape.compute_bytes

    def logits_bytes(self, token_count: int) -> int:
        """Return what the logits of so many tokens take while their log probabilities are computed."""
        return _LIVE_LOGIT_COPIES * 4 * self.shape.vocabulary_size * token_count

    def measured_token_count(self, *, budget_bytes: int, block_token_count: int) -> int:
        """Return how many tokens' logits fit the budget: at least one, and a divisor or a multiple of the
        block size, so that chunks can end where blocks do."""
        fitting = max(1, budget_bytes // max(1, self.logits_bytes(1)))
        if fitting >= block_token_count:
            return fitting // block_token_count * block_token_count
        return next(n for n in range(fitting, 0, -1) if block_token_count % n == 0)

    def request_bytes(self, *, token_count: int, chunk_token_count: int) -> int:
        """Return the peak memory of a request of this many tokens, output included."""
        chunk = min(chunk_token_count, token_count)
        return (
            self.kv_bytes(token_count - chunk)
            + self.growth_bytes(chunk_token_count=chunk, context_token_count=token_count)
            + self.chunk_bytes(chunk_token_count=chunk, context_token_count=token_count)
        )


def value_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a floating-point value according to config.json, or 2 if it does not say."""
    scopes = [config, *(config[key] for key in _NESTED if isinstance(config.get(key), dict))]
    named = (scope.get(key) for scope in scopes for key in ("torch_dtype", "dtype"))
    return 4 if "float32" in named else 2


def find_int(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of `names` that has an integer value in the config or in a text config inside it."""
    scopes = [config, *(config[key] for key in _NESTED if isinstance(config.get(key), dict))]
    for scope in scopes:
        for name in names:
            value = scope.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
