"""What models' KV takes, computed from the numbers of their public config.json.

The formula is tested against what the server measures on tiny models of the same architectures. Tables for
docs/capacity.md, docs/sizes.md, docs/howto/several-models.md and docs/howto/group.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK_TOKEN_COUNT = 256
_KIB = 1 << 10
_GIB = 1 << 30
_SECONDS_PER_DAY = 86_400
_DAYS_PER_YEAR = 365


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """How many layers of a model keep KV, and for how long."""

    full_count: int
    """Unlimited context."""
    window_count: int
    window_token_count: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layers:
        """Read them from a config.json."""
        layer_count = int(config["num_hidden_layers"])
        window = int(config.get("sliding_window") or 0)
        kinds = _kinds(config, layer_count)
        window_count = kinds.count("sliding_attention")
        return cls(kinds.count("full_attention"), window_count, window if window_count else 0)


def row_bytes(config: Mapping[str, Any], *, value_bytes: float) -> float:
    """Return the bytes that one token takes in one layer with attention: its key and its value."""
    if "kv_lora_rank" in config:
        # Latent attention keeps one compressed vector and the rotated part of the key for all heads.
        return value_bytes * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return value_bytes * 2 * int(config.get("num_key_value_heads") or heads) * head_dim


def quantized_value_bytes(*, bits: int, group_size: int, scale_bytes: float) -> float:
    """Return the bytes of one value of quantized KV, its share of a scale and a bias included."""
    return bits / 8 + 2 * scale_bytes / group_size


def kv_bytes_per_token(config: Mapping[str, Any], *, value_bytes: float) -> float:
    """Return the bytes that each further token takes in memory, over all layers of unlimited context."""
    return Layers.of(config).full_count * row_bytes(config, value_bytes=value_bytes)


def window_bytes(config: Mapping[str, Any], *, value_bytes: float) -> float:
    """Return the bytes of one sequence's sliding windows when they are full."""
    layers = Layers.of(config)
    return layers.window_count * layers.window_token_count * row_bytes(config, value_bytes=value_bytes)


def block_bytes(
    config: Mapping[str, Any], *, value_bytes: float, block_token_count: int = BLOCK_TOKEN_COUNT
) -> float:
    """Return the bytes of one full block on SSD, without checkpoints and headers."""
    layers = Layers.of(config)
    kept = min(block_token_count, layers.window_token_count) * layers.window_count
    rows = layers.full_count * block_token_count + kept
    return rows * row_bytes(config, value_bytes=value_bytes)


def _kinds(config: Mapping[str, Any], layer_count: int) -> list[str]:
    """Return each layer's kind as `layer_types` of newer configs calls it."""
    if "layer_types" in config:
        return list(config["layer_types"])
    if interval := config.get("full_attention_interval"):
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layer_count)]
    pattern = config.get("sliding_window_pattern")
    if config.get("model_type") == "gpt_oss":
        pattern = 2
    if pattern:
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layer_count)]
    return ["none" if config.get("model_type") == "mamba2" else "full_attention"] * layer_count


def _dense(layers: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": kv_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {"num_hidden_layers": layers, **heads, **more}


MODELS: Mapping[str, dict[str, Any]] = {
    "SmolLM2 135M": _dense(30, 3, 64),
    "Gemma 3 270M": _dense(18, 1, 256, sliding_window=512, sliding_window_pattern=6),
    "Gemma 3 4B": _dense(34, 4, 256, sliding_window=1024, sliding_window_pattern=6),
    "Gemma 3 12B": _dense(48, 8, 256, sliding_window=1024, sliding_window_pattern=6),
    "Gemma 3 27B": _dense(62, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss 20B": _dense(24, 8, 64, sliding_window=128, model_type="gpt_oss"),
    "gpt-oss 120B": _dense(36, 8, 64, sliding_window=128, model_type="gpt_oss"),
    "Llama 3.2 1B": _dense(16, 8, 64),
    "Llama 3.2 3B": _dense(28, 8, 128),
    "Llama 3.1 8B": _dense(32, 8, 128),
    "Llama 3.3 70B": _dense(80, 8, 128),
    "Mistral 7B v0.3": _dense(32, 8, 128),
    "Mistral Small 24B": _dense(40, 8, 128),
    "Phi-4 14B": _dense(40, 10, 128),
    "Qwen2.5 7B": _dense(28, 4, 128),
    "Qwen3 0.6B": _dense(28, 8, 128),
    "Qwen3 8B": _dense(36, 8, 128),
    "Qwen3 32B": _dense(64, 8, 128),
    "Qwen3 30B-A3B": _dense(48, 4, 128),
    "Qwen3 235B-A22B": _dense(94, 4, 128),
    "Qwen3-Next 80B-A3B": _dense(48, 2, 256, full_attention_interval=4),
    "DeepSeek V3": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}
"""The numbers of their config.json that the formula reads."""

_BF16 = 2.0
_EIGHT_BITS = quantized_value_bytes(bits=8, group_size=64, scale_bytes=_BF16)


def kv_table() -> str:
    """Return the table of KV per token. Whether latent attention can be quantized is not known: "?"."""
    lines = [
        "| model | KV per token in memory, bf16 | the same with `--kv-bits 8` "
        "| sliding windows of one sequence | SSD per token, bf16 | tokens in 32 GiB of SSD |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        ssd = block_bytes(config, value_bytes=_BF16) / BLOCK_TOKEN_COUNT
        windows = window_bytes(config, value_bytes=_BF16)
        cells = (
            name,
            _kib(kv_bytes_per_token(config, value_bytes=_BF16)),
            "?" if "kv_lora_rank" in config else _kib(kv_bytes_per_token(config, value_bytes=_EIGHT_BITS)),
            f"{windows / (1 << 20):.0f} MiB" if windows else "none",
            _kib(ssd),
            f"{32 * _GIB / ssd:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wear_table(
    *, endurance_tb: float = 600, tokens_per_s: Sequence[float] = (10, 100, 1000), model: str = "Llama 3.1 8B"
) -> str:
    """Return how long a drive lasts when so many new tokens a second are written, day and night."""
    token_bytes = block_bytes(MODELS[model], value_bytes=_BF16) / BLOCK_TOKEN_COUNT
    lines = [
        "| new prompt tokens per second, all day | written per day | "
        f"{endurance_tb:.0f} TB written after | `--daily-write-bytes` that makes them last 5 years |",
        "|---|---|---|---|",
    ]
    allowed = endurance_tb * 1e12 / (5 * _DAYS_PER_YEAR)
    for rate in tokens_per_s:
        daily_bytes = rate * token_bytes * _SECONDS_PER_DAY
        years = endurance_tb * 1e12 / daily_bytes / _DAYS_PER_YEAR
        lines.append(
            f"| {rate:,.0f} | {daily_bytes / 1e12:.2f} TB | {_time(years)} | {allowed / _GIB:.0f}GiB |"
        )
    return "\n".join(lines)


PARAMETER_COUNTS: Mapping[str, float] = {
    "Qwen3 0.6B": 0.6e9,
    "Qwen3 Embedding 0.6B": 0.6e9,
    "Qwen3 Reranker 0.6B": 0.6e9,
    "Llama 3.2 3B": 3.2e9,
    "Qwen3 8B": 8.2e9,
    "Llama 3.1 8B": 8.0e9,
    "gpt-oss 20B": 20.9e9,
    "Mistral Small 24B": 23.6e9,
    "Qwen3 30B-A3B": 30.5e9,
    "Qwen3 32B": 32.8e9,
    "Llama 3.3 70B": 70.6e9,
    "Qwen3-Next 80B-A3B": 80e9,
    "gpt-oss 120B": 117e9,
    "Qwen3 235B-A22B": 235e9,
}
"""As their makers give them."""

_WEIGHT_BYTES = quantized_value_bytes(bits=4, group_size=64, scale_bytes=_BF16)
_LIMIT_SHARE = 0.9
_RAM_TIER_SHARE = 0.2
"""Of the working set: `bootstrap/machine.py` has both as the server's defaults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mac:
    """A Mac: its memory, and the share of it that Metal recommends a process to use at most."""

    memory_bytes: int
    working_set_share: float
    models: tuple[str, ...]
    together: tuple[str, ...]
    """Loaded at once; the first is the largest, whose KV the rest is for."""

    @property
    def working_set_bytes(self) -> float:
        """What Metal recommends."""
        return self.working_set_share * self.memory_bytes


_FOR_SEARCH = ("Qwen3 Embedding 0.6B", "Qwen3 Reranker 0.6B")
MACS = (
    Mac(
        16 * _GIB,
        2 / 3,
        ("Llama 3.2 3B", "Llama 3.1 8B", "Qwen3 8B"),
        together=("Llama 3.1 8B", "Qwen3 0.6B"),
    ),
    Mac(
        64 * _GIB,
        3 / 4,
        ("Qwen3 8B", "gpt-oss 20B", "Mistral Small 24B", "Qwen3 30B-A3B", "Qwen3 32B"),
        together=("Qwen3 30B-A3B", "Qwen3 0.6B", *_FOR_SEARCH),
    ),
    Mac(
        192 * _GIB,
        3 / 4,
        ("Qwen3 32B", "Llama 3.3 70B", "Qwen3-Next 80B-A3B", "gpt-oss 120B"),
        together=("gpt-oss 120B", "Qwen3 30B-A3B", "Qwen3 0.6B", *_FOR_SEARCH),
    ),
)
_SSD_BYTES_PER_S = 5e9
"""What a Mac's internal SSD reads; not measured here."""


def mac_table() -> str:
    """Return what of a Mac's memory is left for KV beside a model of 4 bits, and how many tokens that is."""
    lines = [
        "| Mac | model, 4 bits | weights | left for KV | tokens in it, bf16 "
        "| of it RAM tier | tokens in the tier |",
        "|---|---|---|---|---|---|---|",
    ]
    for mac in MACS:
        for name in mac.models:
            weights = PARAMETER_COUNTS[name] * _WEIGHT_BYTES
            left = _LIMIT_SHARE * mac.working_set_bytes - weights
            tier = _RAM_TIER_SHARE * mac.working_set_bytes
            token = kv_bytes_per_token(MODELS[name], value_bytes=_BF16)
            assert 0 < tier < left, f"{name} leaves no room on this Mac"
            cells = (
                f"{mac.memory_bytes // _GIB} GB",
                name,
                f"{weights / _GIB:.1f} GiB",
                f"{left / _GIB:.1f} GiB",
                f"{left / token:,.0f}",
                f"{tier / _GIB:.1f} GiB",
                f"{tier / token:,.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def together_table() -> str:
    """Return what several models of 4 bits leave for KV, and how long it takes to bring the first one in."""
    lines = [
        "| Mac | loaded together, 4 bits | weights | left for KV | tokens of the first in it, bf16 "
        "| reading its weights | reading 30,000 tokens of its KV |",
        "|---|---|---|---|---|---|---|",
    ]
    for mac in MACS:
        sizes = [PARAMETER_COUNTS[name] * _WEIGHT_BYTES for name in mac.together]
        left = _LIMIT_SHARE * mac.working_set_bytes - sum(sizes)
        token = kv_bytes_per_token(MODELS[mac.together[0]], value_bytes=_BF16)
        assert left > 0, f"{mac.together} leave no room on this Mac"
        cells = (
            f"{mac.memory_bytes // _GIB} GB",
            ", ".join(mac.together),
            f"{sum(sizes) / _GIB:.1f} GiB",
            f"{left / _GIB:.1f} GiB",
            f"{left / token:,.0f}",
            f"{sizes[0] / _SSD_BYTES_PER_S:.1f} s",
            f"{30_000 * token / _SSD_BYTES_PER_S:.1f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_MEMORY_BYTES_PER_S = 546e9
"""What an M4 Max reads from its memory, by its maker."""
_SUM_S = {"TCP": 100e-6, "RDMA": 10e-6}
"""A sum over two ranks: measured over TCP on loopback (MLX's ring, two x86 cores), assumed for RDMA."""
_READ_COUNTS: Mapping[str, float] = {"Qwen3 8B": 8.2e9, "Llama 3.3 70B": 70.6e9, "Qwen3 235B-A22B": 22e9}
"""Parameters that are read for a token."""
_WORLDS = (1, 2, 4)
_SUMS_PER_LAYER = 2
"""Behind the attention and behind the feed-forward network."""


def group_table() -> str:
    """Return what each of several Macs holds of a model, and how many tokens a second one stream may get."""
    lines = [
        "| model, 4 bits | layers | weights on each of 1, 2, 4 | tokens/s on 1, 2, 4 over TCP | over RDMA |",
        "|---|---|---|---|---|",
    ]
    for name, read_count in _READ_COUNTS.items():
        layer_count = int(MODELS[name]["num_hidden_layers"])
        weights = PARAMETER_COUNTS[name] * _WEIGHT_BYTES
        read_s = read_count * _WEIGHT_BYTES / _MEMORY_BYTES_PER_S
        cells = [
            name,
            str(layer_count),
            ", ".join(f"{weights / world / _GIB:.1f}" for world in _WORLDS) + " GiB",
        ]
        for sum_s in _SUM_S.values():
            # A sum passes round the ring: every rank sends to the next one, world - 1 times.
            times = [
                read_s / world + layer_count * _SUMS_PER_LAYER * (world - 1) * sum_s for world in _WORLDS
            ]
            cells.append(", ".join(f"{1 / each:.0f}" for each in times))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(years: float) -> str:
    return f"{years:.1f} years" if years >= 1 else f"{years * _DAYS_PER_YEAR:.0f} days"


def _kib(size_bytes: float) -> str:
    return f"{size_bytes / _KIB:.4g} KiB"
