"""A toy vocabulary with every kind of piece, in Gemma's conventions."""

import jinja2
import pytest

from service.demo.tokenizer import CHAT_TEMPLATE, SPACE, PieceKind, Vocabulary, find_merges, make_tokenizer

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
