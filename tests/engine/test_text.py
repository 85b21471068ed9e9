"""Text leaves whole: no split characters, no leaked stop strings, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.text import Detokenizer, StopFilter, TextStream
from tests.models.vocabulary import tokenizer

TOKENIZER = tokenizer()


def decode(ids) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text(max_size=60), st.text(max_size=20))
def test_pieces_add_up_and_no_character_is_split(text: str, prompt: str) -> None:
    detokenizer = Detokenizer(decode, encode(prompt))
    pieces = [detokenizer.push(token) for token in encode(text)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_an_emoji_comes_with_its_last_byte() -> None:
    ids = encode("🧊")
    assert len(ids) > 1, "the vocabulary must split it, or this tests nothing"
    detokenizer = Detokenizer(decode, [])
    pieces = [detokenizer.push(token) for token in ids]
    assert pieces == [""] * (len(ids) - 1) + ["🧊"]


def test_endless_garbage_is_let_go_in_the_end() -> None:
    lead_byte = encode("🧊")[0]
    detokenizer = Detokenizer(decode, [])
    pieces = [detokenizer.push(lead_byte) for _ in range(40)]
    assert "\ufffd" in "".join(pieces), "undecodable bytes must not be held for ever"


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(decode, [])
    assert detokenizer.push(encode("🧊")[0]) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "pushed", "sent", "stop"),
    [
        (("END",), ["abcE", "N", "Dxyz"], "abc", "END"),
        (("END",), ["abcE", "N", "d"], "abcENd", None),
        (("aab",), ["aaab"], "a", "aab"),
        (("bcd", "c"), ["abcd"], "a", "bcd"),
        (("\n\n",), ["one\n", "two\n", "\n"], "one\ntwo", "\n\n"),
        ((), ["x"], "x", None),
    ],
)
def test_stop_strings(stops, pushed, sent, stop) -> None:
    stop_filter = StopFilter(stops)
    text, found = "", None
    for piece in pushed:
        step = stop_filter.push(piece)
        text += step.text
        if step.stop_string:
            found = step.stop_string
            break
    else:
        text += stop_filter.flush()
    assert (text, found) == (sent, stop)


@given(
    st.text(alphabet="abc🧊", max_size=40),
    st.lists(st.text(alphabet="abc🧊", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_the_text_before_the_first_stop(text: str, stops: list[str], random) -> None:
    stop_filter = StopFilter(stops)
    sent, found, rest = "", None, text
    while rest and found is None:
        cut = random.randint(1, len(rest))
        step = stop_filter.push(rest[:cut])
        rest = rest[cut:]
        sent += step.text
        found = step.stop_string
    if found is None:
        sent += stop_filter.flush()
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert (sent, found) == (text, None)
    else:
        assert found is not None and sent + found == text[: len(sent) + len(found)]
        assert not any(s in sent for s in stops), "a stop string leaked"


def test_text_held_for_a_stop_is_sent_when_the_output_ends() -> None:
    stream = TextStream(decode=decode, prompt_token_ids=[], stops=("xyz",))
    sent = "".join(stream.push(t).text for t in encode("abxy"))
    assert sent == "ab"
    assert stream.finish().text == "xy"
