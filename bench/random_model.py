"""A model folder with random weights, made on the fly: no download, and steps of tens of ms.

16 layers of 8 KV heads of 128 in float32 are 128 KiB of KV per token, as with models many times its
size, while its 70 million weights prefill 1,000 tokens in a few seconds on two x86 cores. Its output is
no language; its replies are full length and each token is text at once, so that arrival can be timed.
"""

from __future__ import annotations

import argparse
import enum
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.server_process import ROOT, child_environment
from tests.fixtures.models.folder import tiny_model_dir
from tests.fixtures.models.vocabulary import tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 16,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
THIN_SHAPE: dict[str, Any] = {**SHAPE, "hidden_size": 256, "intermediate_size": 256}
"""As much KV per token from 20 million weights: a step is short compared with the server's overhead."""
FLAT_SHAPE: dict[str, Any] = {**SHAPE, "hidden_size": 64, "intermediate_size": 64}
"""As much KV, for almost no computation."""
MEDIUM_SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2560,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
"""Ninety million weights beside 24 KiB of KV per token: as real models, it is larger than a conversation."""
SMALL_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 65536,
}
"""A twentieth of the work, for benches of many requests."""
WINDOWS_SHAPE: dict[str, Any] = {**SMALL_SHAPE, "sliding_window": 512, "sliding_window_pattern": 6}
"""As small, but one layer of six has unlimited context: two x86 cores prefill 30,000 tokens in minutes."""

DEEP_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 36,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
"""As many layers as a model of four billion weights, and little to compute: a pass is the host's work."""
TINY_SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 65536}
"""As small as those of the tests: nearly all of a request's time is the server's work."""


class RandomModel(enum.Enum):
    """The random models that can be made."""

    LARGE = "large"
    MEDIUM = "medium"
    MEDIUM_QWEN = "medium-qwen"
    THIN = "thin"
    FLAT = "flat"
    SMALL = "small"
    WINDOWS = "windows"
    DEEP = "deep"
    TINY = "tiny"


_MADE_OF = {
    RandomModel.LARGE: ("llama", SHAPE),
    RandomModel.MEDIUM: ("llama", MEDIUM_SHAPE),
    RandomModel.MEDIUM_QWEN: ("qwen3", MEDIUM_SHAPE),
    RandomModel.THIN: ("llama", THIN_SHAPE),
    RandomModel.FLAT: ("llama", FLAT_SHAPE),
    RandomModel.SMALL: ("llama", SMALL_SHAPE),
    RandomModel.WINDOWS: ("gemma3_text", WINDOWS_SHAPE),
    RandomModel.DEEP: ("qwen3", DEEP_SHAPE),
    RandomModel.TINY: ("llama", TINY_SHAPE),
}
"""Architecture and sizes."""
KV_BYTES_PER_TOKEN = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]


def make_random_model(parent: Path, *, which: RandomModel = RandomModel.LARGE) -> Path:
    """Write the folder below `parent`, in a child process so that this one holds no weights; return it."""
    command = [sys.executable, "-m", "bench.random_model", str(parent), which.value]
    subprocess.run(command, cwd=ROOT, env=child_environment(), check=True)
    return parent / _name(which)


def _name(which: RandomModel) -> str:
    return f"random-{which.value}"


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parent", type=Path)
    parser.add_argument("which", choices=[which.value for which in RandomModel])
    arguments = parser.parse_args()
    which = RandomModel(arguments.which)
    architecture, shape = _MADE_OF[which]
    folder = tiny_model_dir(arguments.parent, architecture, name=_name(which), **shape)
    never_emit_partial_characters(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == shape["num_hidden_layers"], "the shape did not reach the folder"


def never_emit_partial_characters(folder: Path, *, head_name: str = "lm_head.weight") -> None:
    """Give logit 0 to tokens that are parts of characters or have no text, and random logits to the others.

    A server holds such tokens back until there is text, so they could not be timed.
    """
    words = tokenizer()
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    head = weights[head_name]
    texts = [words.decode([i]) for i in range(head.shape[0])]
    whole = [[float(bool(text) and "\ufffd" not in text)] for text in texts]
    weights[head_name] = head * mx.array(whole)
    mx.eval(weights)
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
