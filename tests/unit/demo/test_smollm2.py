"""SmolLM2's conventions: names, rotated rows, turns, and a toy vocabulary of bytes and merges."""

import json
from collections.abc import Mapping, Sequence

import jinja2
import numpy as np
import pytest
from gguf import TokenType
from icehouse_server.demo.smollm2 import CHAT_TEMPLATE, convert_tensor, make_tokenizer, model_config
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = {"Ġa": "Ġ a", "ab": "a b", "Ġab": "Ġa b", "12": "1 2", "'s": "' s"}
PIECES = [*SPECIAL, *sorted(ByteLevel.alphabet()), *MERGED]
METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": [TokenType.CONTROL if p in SPECIAL else TokenType.NORMAL for p in PIECES],
    "tokenizer.ggml.merges": list(MERGED.values()),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "llama.embedding_length": 6,
    "llama.block_count": 30,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 100_000.0,
    "llama.context_length": 8192,
}


@pytest.mark.parametrize(
    ("gguf", "mlx"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.11.attn_v.weight", "model.layers.11.self_attn.v_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_names(gguf: str, mlx: str) -> None:
    values = np.arange(4, dtype=np.float32)
    name, converted = convert_tensor(gguf, values, METADATA)
    assert name == mlx and converted.tolist() == values.tolist()


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(KeyError):
        convert_tensor("blk.0.attn_q.bias", np.zeros(1, np.float32), METADATA)


def rotated_pairs(rows, angles):
    """RoPE as llama.cpp applies it: row 2i turns with row 2i + 1."""
    return (rows.reshape(-1, 2) @ np.array([1, 1j]) * np.exp(1j * angles)).view(float)


def rotated_halves(rows, angles):
    """RoPE as mlx-lm applies it to a llama: row i turns with row i + half."""
    first, second = np.split(rows, 2)
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def test_attention_scores_are_the_same_under_either_rotation() -> None:
    random = np.random.default_rng(7)
    width, head_count, head_dim = 6, 2, 8
    query, key = (random.standard_normal((n * head_dim, width)).astype(np.float32) for n in (head_count, 1))
    _, query_halves = convert_tensor("blk.0.attn_q.weight", query, METADATA)
    _, key_halves = convert_tensor("blk.0.attn_k.weight", key, METADATA)
    there, here = random.standard_normal((2, width))
    speeds = 10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    for head in range(head_count):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        expected = rotated_pairs(query[rows] @ there, 9 * speeds) @ rotated_pairs(key @ here, 4 * speeds)
        found = rotated_halves(query_halves[rows] @ there, 9 * speeds) @ rotated_halves(
            key_halves @ here, 4 * speeds
        )
        assert found == pytest.approx(expected, rel=1e-5)


def test_config_has_what_mlx_lm_reads() -> None:
    config = model_config(METADATA)
    assert (config["model_type"], config["vocab_size"]) == ("llama", len(PIECES))
    assert config["eos_token_id"] == [2, 0]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 8)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="gemma3"):
        model_config({**METADATA, "general.architecture": "gemma3"})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab ab", ["ab", "Ġab"]),
        ("a12", ["a", "1", "2"]),
        ("a's", ["a", "'s"]),
        ("é\n", ["Ã", "©", "Ċ"]),
        ("<|im_start|>ab<|im_end|>", ["<|im_start|>", "ab", "<|im_end|>"]),
        ("<|im_start |>", list("<|im_startĠ|>")),
    ],
)
def test_text_is_cut_as_smollm_cuts_it(text: str, pieces: list[str]) -> None:
    encoding = make_tokenizer(METADATA).encode(text)
    assert encoding.tokens == pieces
    assert make_tokenizer(METADATA).decode(encoding.ids, skip_special_tokens=False) == text


def rendered(messages: Sequence[Mapping[str, object]], **arguments: object) -> str:
    environment = jinja2.Environment()
    # As transformers renders it: plain JSON, nothing escaped for HTML.
    environment.filters["tojson"] = json.dumps
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **arguments)


QUESTION = {"role": "user", "content": " Hi "}


def test_chat_template_writes_the_turns_of_smollm2() -> None:
    turns = "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    shown = "<|im_start|>system\nBe brief.<|im_end|>\n"
    own = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    system = {"role": "system", "content": "Be brief."}
    assert rendered([system, QUESTION], add_generation_prompt=True) == shown + turns
    assert rendered([QUESTION], add_generation_prompt=True) == own + turns
    assert rendered([QUESTION, system]) == own + turns.removesuffix("<|im_start|>assistant\n") + shown


def test_chat_template_shows_tools_calls_and_their_results() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
    ]
    text = rendered(messages, tools=[{"function": {"name": "f"}}])
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert '\n\nFunctions:\n{"name": "f"}\nTo call one, write\n<tool_call>\n' in text
    assert f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n" in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n")
