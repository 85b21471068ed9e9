"""Text leaves whole: no split characters, no leaked stop strings, nothing lost."""

from __future__ import annotations

import pytest
from icehouse_server.text.detokenizer import Detokenizer, StopFilter, TextStream

from tests.fixtures.models.vocabulary import tokenizer

TOKENIZER = tokenizer()


def decode(ids) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


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


@pytest.mark.parametrize("prompt_end", ["\ufffd", "🧊\ufffd"])
def test_what_the_prompt_ends_with_is_not_output(prompt_end: str) -> None:
    prompt = encode("a" + prompt_end)
    for unfinished in (prompt, [*prompt, encode("🧊")[0]]):
        detokenizer = Detokenizer(decode, unfinished)
        assert "".join([*(detokenizer.push(token) for token in encode("bc")), detokenizer.flush()]) == "bc"
        assert Detokenizer(decode, unfinished).flush() == ""


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
        (("bcd", "c"), ["abcd"], "ab", "c"),
        (("ab", "abc"), ["xabcd"], "x", "ab"),
        (("bc", "abc"), ["xabcd"], "x", "abc"),
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


def test_text_held_for_a_stop_is_sent_when_the_output_ends() -> None:
    stream = TextStream(decode=decode, prompt_token_ids=[], stops=("xyz",))
    sent = "".join(stream.push(t).text for t in encode("abxy"))
    assert sent == "ab"
    assert stream.finish().text == "xy"


def test_a_stop_string_counts_only_behind_the_tokens_that_must_come() -> None:
    stream = TextStream(
        decode=lambda ids: "".join(chr(i) for i in ids),
        prompt_token_ids=[],
        stops=("ab",),
        unsearched_token_count=3,
    )
    steps = [stream.push(ord(character)) for character in "abababx"]
    # The second "ab" begins among the first three characters, so only the third one ends the text.
    assert [step.stop_string for step in steps[:6]] == [None] * 5 + ["ab"]
    assert "".join(step.text for step in steps[:6]) == "abab"
