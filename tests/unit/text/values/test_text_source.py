"""A source decides by its text alone, never by the pieces that it came in."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.text.values.text_source import Malformed, Reading, TextSource, TooLong, read_whole

from tests.fixtures.chat.reply_pieces import cut_at

MARKERS = ("<a>", "<ab>", "b<", "<a>b")
TEXTS = st.lists(st.sampled_from(["<a", ">", "b", "<", "ab>", "x"]), max_size=12).map("".join)


def split(pieces: list[str]) -> list[tuple[str, str]]:
    """Return what stands before each marker, and the marker."""
    source = TextSource()
    found: list[tuple[str, str]] = []

    def reading() -> Reading[None]:
        while True:
            parts: list[str] = []
            marker = yield from source.until(MARKERS, parts.append)
            found.append(("".join(parts), marker))
            if not marker:
                return

    running = reading()
    for piece in pieces:
        source.push(piece)
        next(running, None)
    source.end()
    next(running, None)
    return found


def plainly(text: str) -> list[tuple[str, str]]:
    """Return the same, looked for at each place in turn: the longest marker of the first that has one."""
    for place in range(len(text)):
        marker = max((m for m in MARKERS if text.startswith(m, place)), key=len, default="")
        if marker:
            return [(text[:place], marker), *plainly(text[place + len(marker) :])]
    return [(text, "")]


@given(text=TEXTS, places=st.lists(st.integers(0, 100), max_size=8))
def test_the_first_marker_counts_and_the_longest_of_one_place(text: str, places: list[int]) -> None:
    assert split(cut_at(text, places)) == plainly(text)


def test_what_may_become_a_marker_is_held_back_and_nothing_else() -> None:
    source = TextSource()
    emitted: list[str] = []
    running = source.until(("<think>",), emitted.append)
    for piece, known in (("a<", "a"), ("th", "a"), ("x<", "a<thx"), ("<think", "a<thx<")):
        source.push(piece)
        next(running)
        assert "".join(emitted) == known


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_record_is_bounded_at_the_same_character_for_any_pieces(size: int) -> None:
    source = TextSource()
    source.record("<", limit=10)
    running = source.until(("!",), lambda _: None)
    with pytest.raises(TooLong):
        for _start in range(0, 60, size):
            source.push("x" * size)
            next(running)
    assert source.recorded() == "<" + "x" * 9


def test_what_was_read_can_be_given_back() -> None:
    source = TextSource("abc", has_ended=True)
    source.record("", limit=10)
    assert source.take(2) == "ab"
    source.put_back("b")
    assert (source.rest, source.read_length, source.recorded()) == ("bc", 1, "a")


def test_a_pattern_waits_until_more_text_could_change_nothing() -> None:
    pattern = regex.compile(r"a{1,9}(?=b)")
    source = TextSource()
    running = source.ahead(pattern)
    for piece in ("a", "aa"):
        source.push(piece)
        next(running)
    source.push("b!")
    with pytest.raises(StopIteration) as stopped:
        next(running)
    assert stopped.value.value[0] == "aaa"


def test_a_reader_that_wants_more_than_there_is_says_so() -> None:
    def reading() -> Reading[str]:
        source = TextSource("", has_ended=True)
        if not (yield from source.peek()):
            raise Malformed("it ended")
        return "never"

    with pytest.raises(Malformed):
        read_whole(reading())
