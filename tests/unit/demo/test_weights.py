"""Names, norms and rounding of the GGUF conversion, on arrays of a few numbers."""

from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.demo.weights import Tensor, mlx_name, model_config, to_bfloat16, write_weights

METADATA = {
    "general.architecture": "gemma3",
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<end_of_turn>"],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1_000_000.0,
    "gemma3.context_length": 32768,
}


@pytest.mark.parametrize(
    ("gguf", "mlx"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.11.attn_q_norm.weight", "model.layers.11.self_attn.q_norm.weight"),
        ("blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
    ],
)
def test_names(gguf: str, mlx: str) -> None:
    assert mlx_name(gguf) == mlx


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(KeyError):
        mlx_name("blk.0.ssm_in.weight")


@given(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32))
def test_bfloat16_is_the_nearest_one(number: float) -> None:
    bits = int(to_bfloat16(np.array([number], np.float32))[0])

    def value(pattern: int) -> float:
        return float(np.array([pattern << 16], np.uint32).view(np.float32)[0])

    distance = abs(value(bits) - number)
    assert distance <= abs(value(bits + 1) - number)
    assert (bits & 0x7FFF) == 0 or distance <= abs(value(bits - 1) - number)


def test_bfloat16_ties_go_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert to_bfloat16(halfway).tolist() == [0x3F80, 0x3F82]


def test_norms_lose_their_one_and_others_do_not(tmp_path: Path) -> None:
    tensors = [
        Tensor("blk.0.attn_norm.weight", (2,), 0, np.array([1.5, 3.0], np.float32)),
        Tensor("blk.0.ffn_up.weight", (1, 2), 0, np.array([[1.5, 3.0]], np.float32)),
    ]
    progress: list[float] = []
    file = tmp_path / "model.safetensors"
    write_weights(tensors, file, dequantize=lambda data, encoding: data, on_progress=progress.append)
    stored = {
        name: (info["dtype"], info["data"]) for name, info in safetensors.deserialize(file.read_bytes())
    }
    assert stored == {
        "model.layers.0.input_layernorm.weight": ("BF16", _bfloat16_bytes(0.5, 2.0)),
        "model.layers.0.mlp.up_proj.weight": ("BF16", _bfloat16_bytes(1.5, 3.0)),
    }
    assert progress == [0.5, 1.0]


def test_config_has_what_mlx_lm_reads() -> None:
    config = model_config(METADATA)
    assert config["model_type"] == "gemma3_text"
    assert config["eos_token_id"] == [1, 3]
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="llama"):
        model_config({**METADATA, "general.architecture": "llama"})


def _bfloat16_bytes(*numbers: float) -> bytes:
    """Bytes of numbers that bfloat16 holds exactly: the upper halves of their float32 form."""
    return (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
