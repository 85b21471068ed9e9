"""A toy vocabulary with every kind of piece, in Gemma's conventions."""

import json
from pathlib import Path

import jinja2
import pytest
from icehouse_server.demo.tokenizer import (
    CHAT_TEMPLATE,
    SPACE,
    PieceKind,
    Vocabulary,
    find_merges,
    make_tokenizer,
    renew_template,
)

CONTROL, USER, NORMAL, BYTE = PieceKind.CONTROL, PieceKind.USER_DEFINED, PieceKind.NORMAL, PieceKind.BYTE
PIECES = [
    *[(name, CONTROL) for name in ("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>")],
    *[("\n", USER), ("\n\n", USER), ("  ", USER), ("<table>", USER)],
    *[(f"<0x{value:02X}>", BYTE) for value in range(256)],
    *[(piece, NORMAL) for piece in ("ab", "abc", f"{SPACE}a", f"{SPACE}ab", "a", "b", "c", SPACE)],
]
VOCABULARY = Vocabulary(
    pieces=[piece for piece, _ in PIECES],
    kinds=[kind for _, kind in PIECES],
    bos_id=2,
    eos_id=1,
    unknown_id=3,
    padding_id=0,
)


def pieces_of(text: str) -> list[str]:
    tokens: list[str] = make_tokenizer(VOCABULARY).encode(text).tokens
    return tokens


def test_merges_follow_the_order_of_the_pieces() -> None:
    merges = find_merges(VOCABULARY.pieces, VOCABULARY.kinds)
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
def test_text_is_cut_as_gemma_cuts_it(text: str, pieces: list[str]) -> None:
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


def test_an_older_template_is_renewed_and_a_fresh_one_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    for old in (None, "old"):
        if old is not None:
            file.write_text(old)
        renew_template(tmp_path)
        assert file.read_text() == CHAT_TEMPLATE
    written = file.stat().st_ino
    renew_template(tmp_path)
    assert file.stat().st_ino == written and list(tmp_path.iterdir()) == [file]
