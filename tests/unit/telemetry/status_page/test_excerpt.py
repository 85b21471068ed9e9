"""The excerpt: one short line, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from icehouse_server.domain.blocks import image_keys
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.telemetry.status_page.page import CHARACTER_LIMIT, HEAD_TOKEN_LIMIT, excerpt
from tokenizers import Tokenizer

from tests.fixtures.models.vocabulary import byte_fallback_tokenizer, tokenizer

PLAIN = tokenizer()
FALLBACK = byte_fallback_tokenizer()


def decode(token_ids: Sequence[int]) -> str:
    return str(PLAIN.decode(list(token_ids), skip_special_tokens=True))


def ids(text: str) -> tuple[int, ...]:
    return tuple(PLAIN.encode(text, add_special_tokens=False).ids)


def shown(text: str, *, is_whole: bool = True) -> str:
    return excerpt(ids(text), decode, is_whole=is_whole)


def test_a_short_text_is_shown_whole_and_one_that_goes_on_ends_in_an_ellipsis() -> None:
    assert shown("a house of ice") == "a house of ice"
    assert shown("a house of ice", is_whole=False) == "a house of ice…"
    assert shown("") == ""


def test_a_long_text_is_cut_after_so_many_characters() -> None:
    assert shown("the " * 25) == ("the " * 25)[:CHARACTER_LIMIT] + "…"


def test_no_more_than_so_many_tokens_are_looked_at() -> None:
    looked: list[int] = []

    def note(token_ids: Sequence[int]) -> str:
        looked.append(len(token_ids))
        return decode(token_ids)

    spaces = ids("\n") * (2 * HEAD_TOKEN_LIMIT)
    assert excerpt((*spaces, *ids("house")), note, is_whole=True) == "…"
    garbage = ids("é")[:1] * (2 * HEAD_TOKEN_LIMIT)
    assert excerpt(garbage, note, is_whole=True) == "…"
    assert max(looked) == HEAD_TOKEN_LIMIT and len(looked) <= 20


def test_special_tokens_are_no_text() -> None:
    assert shown("<|im_start|>the house<|im_end|>") == "the house"


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("last", range(5))
@pytest.mark.parametrize("built", [PLAIN, FALLBACK], ids=["byte_level", "byte_fallback"])
def test_characters_cut_at_either_end_are_left_out(built: Tokenizer, first: int, last: int) -> None:
    smile = "\N{SMILING FACE WITH SUNGLASSES}"
    token_ids = built.encode(smile * 3, add_special_tokens=False).ids[-12:]
    kept = tuple(token_ids[first : len(token_ids) - last])
    text = excerpt(kept, lambda some: str(built.decode(list(some))), is_whole=True)
    assert text == smile * (3 - (first + 3) // 4 - (last + 3) // 4)


def test_images_show_as_a_word_each_and_their_tokens_are_not_decoded() -> None:
    first, second = (ImageDigest(bytes([number]) * 32) for number in (1, 2))
    keys = (*ids("the "), *image_keys(first, [4] * 3), *image_keys(second, [4] * 2), *ids(" end"))
    assert excerpt(keys, decode, is_whole=True) == "the [image] [image] end"
    many = image_keys(first, [4] * (2 * HEAD_TOKEN_LIMIT), place=5)
    assert excerpt(many, decode, is_whole=True) == "[image]…"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\n\t b\u2028c\u2029d\x85e\xa0f", "a b c d e f"),
        ("a\x00b\x1b[31mc\x7fd\x9be", "a�b�[31mc�d�e"),
        ("a\u202eb\u2066c\u200fd\u061ce", "a�b�c�d�e"),
        ("a\ufeffb\u00adc\u2060d\U000e0041e\ue000f", "a�b�c�d�e�f"),
        ("می\u200cخواهم \U0001f468\u200d\U0001f469", "می\u200cخواهم \U0001f468\u200d\U0001f469"),
        ("<script>&amp;\"'</script>", "<script>&amp;\"'</script>"),
    ],
    ids=["white_space", "control", "direction", "unseen", "joiners", "markup_is_text"],
)
def test_what_does_not_print_is_replaced(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_half_of_a_pair_can_be_written_as_json_and_utf_8() -> None:
    assert excerpt((1,), lambda _: "a\ud800b", is_whole=True) == "a�b"
