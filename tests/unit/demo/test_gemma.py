"""Gemma's conventions: names, norms, and a toy vocabulary with every kind of piece."""

import json

import jinja2
import numpy as np
import pytest
from gguf import TokenType
from icehouse_server.demo.gemma import (
    CHAT_TEMPLATE,
    SPACE,
    convert_tensor,
    find_merges,
    make_tokenizer,
    model_config,
)

CONTROL, USER, NORMAL, BYTE = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL, TokenType.BYTE
PIECES = [
    *[(name, CONTROL) for name in ("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>")],
    *[("\n", USER), ("\n\n", USER), ("  ", USER), ("<table>", USER)],
    *[(f"<0x{value:02X}>", BYTE) for value in range(256)],
    *[(piece, NORMAL) for piece in ("ab", "abc", f"{SPACE}a", f"{SPACE}ab", "a", "b", "c", SPACE)],
]
VOCABULARY = {
    "tokenizer.ggml.tokens": [piece for piece, _ in PIECES],
    "tokenizer.ggml.token_type": [kind for _, kind in PIECES],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 3,
}


def pieces_of(text: str) -> list[str]:
    tokens: list[str] = make_tokenizer(VOCABULARY).encode(text).tokens
    return tokens


def test_merges_follow_the_order_of_the_pieces() -> None:
    merges = find_merges([piece for piece, kind in PIECES if kind == NORMAL])
    assert merges == [("a", "b"), ("ab", "c"), (SPACE, "a"), (f"{SPACE}a", "b"), (SPACE, "ab")] or merges == [
        ("a", "b"),
        ("ab", "c"),
        (SPACE, "a"),
        (SPACE, "ab"),
        (f"{SPACE}a", "b"),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc ab", ["<bos>", "abc", f"{SPACE}ab"]),
        ("a  b", ["<bos>", "a", SPACE * 2, "b"]),
        ("a\n\n\nb", ["<bos>", "a", "\n\n", "\n", "b"]),
        ("a<table>b", ["<bos>", "a", "<table>", "b"]),
        ("a<end_of_turn>", ["<bos>", "a", "<end_of_turn>"]),
        ("é", ["<bos>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_text_is_split_as_gemma_splits_it(text: str, pieces: list[str]) -> None:
    assert pieces_of(text) == pieces


@pytest.mark.parametrize("text", ["abc  ab\n\nc", "é🙂 a", "  a", "a <table> b"])
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = make_tokenizer(VOCABULARY)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_writes_the_turns_of_gemma() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(messages=messages, bos_token="<bos>", add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_chat_template_shows_tools_calls_and_their_results() -> None:
    environment = jinja2.Environment()
    # As transformers renders it: plain JSON, nothing escaped for HTML.
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(CHAT_TEMPLATE)
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
    ]
    text = template.render(messages=messages, tools=[{"function": {"name": "f"}}], bos_token="<bos>")
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert text.startswith('<bos><start_of_turn>user\nFunctions:\n{"name": "f"}\nTo call one, write\n')
    assert f"<start_of_turn>model\n{called}\n{called}<end_of_turn>\n" in text
    assert text.endswith("<start_of_turn>user\n<tool_response>\n3\n</tool_response><end_of_turn>\n")


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
        ("blk.11.attn_q.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("blk.11.attn_q_norm.weight", "model.layers.11.self_attn.q_norm.weight"),
        ("blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
    ],
)
def test_names(gguf: str, mlx: str) -> None:
    assert convert_tensor(gguf, np.zeros((1, 1), np.float32), METADATA)[0] == mlx


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "rope_freqs.weight", "dec.0.attn_q.weight"])
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(KeyError):
        convert_tensor(name, np.zeros(1, np.float32), METADATA)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("output_norm.weight", [0.5, 2.0]),
        ("blk.0.attn_norm.weight", [0.5, 2.0]),
        ("blk.0.ffn_up.weight", [1.5, 3.0]),
    ],
)
def test_norms_lose_their_one_and_others_do_not(name: str, numbers: list[float]) -> None:
    _, values = convert_tensor(name, np.array([1.5, 3.0], np.float32), METADATA)
    assert values.tolist() == numbers


def test_config_has_what_mlx_lm_reads() -> None:
    config = model_config(METADATA)
    assert config["model_type"] == "gemma3_text"
    assert config["eos_token_id"] == [1, 3]
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="llama"):
        model_config({**METADATA, "general.architecture": "llama"})
