"""An output is split into the same parts however it arrives, and nothing of it is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.chat import (
    CallPiece,
    Conversation,
    MalformedPiece,
    Piece,
    ReasoningPiece,
    RenderedChat,
    TextPiece,
    Tool,
)
from icehouse_server.text.replies.reply_splitter import ReplySplitter

from tests.fixtures.chat.families import (
    ALTERNATING,
    CLOCK,
    HEADERS,
    REMEMBERING,
    SYSTEMLESS,
    THINKING,
    WEATHER,
    tokenizer_of,
    turns,
)
from tests.fixtures.models.chat_templates import Family

BARE = RenderedChat(())
ASKED = turns(("user", "Hi"))
TOOLS = (WEATHER, CLOCK)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "O\\"s}lo", "days": 2}}\n</tool_call>'


def splitter(
    family: Family = THINKING, *, tools: tuple[Tool, ...] = TOOLS, rendered: RenderedChat = BARE
) -> ReplySplitter:
    found = tokenizer_of(family).reply_splitter(
        Conversation(ASKED, tools=tools), rendered, make_call_id=lambda index: f"id{index}"
    )
    assert found is not None
    return found


def split(pieces: list[str], made: ReplySplitter) -> list[Piece]:
    """Return what comes of these pieces of text, neighbours of one kind joined."""
    found = [piece for text in pieces for piece in made.push(text)] + made.finish()
    joined: list[Piece] = []
    for piece in found:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            joined[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            joined[-1] = ReasoningPiece(last.text + piece.text)
        elif (
            isinstance(piece, CallPiece)
            and isinstance(last, CallPiece)
            and last.index == piece.index
            and not (last.name or piece.name or piece.is_withdrawn)
        ):
            joined[-1] = CallPiece(piece.index, arguments_json=last.arguments_json + piece.arguments_json)
        else:
            joined.append(piece)
    return joined


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def calls_of(pieces: list[Piece]) -> list[tuple[str, object]]:
    names = {piece.index: piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name}
    gone = {piece.index for piece in pieces if isinstance(piece, CallPiece) and piece.is_withdrawn}
    texts = {
        index: "".join(p.arguments_json for p in pieces if isinstance(p, CallPiece) and p.index == index)
        for index in names
    }
    return [(names[index], json.loads(texts[index])) for index in names if index not in gone]


def test_a_thoughtful_call_is_recognized() -> None:
    pieces = split([f"<think>\nhm\n</think>\n\nLet me see.{CALL}"], splitter())
    assert pieces == [
        ReasoningPiece("\nhm\n"),
        TextPiece("\n\nLet me see."),
        CallPiece(0, id="id0", name="get_weather"),
        CallPiece(0, arguments_json='{"city": "O\\"s}lo", "days": 2}'),
    ]


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    made = splitter()
    heard = [made.push(character) for character in CALL]
    order = [piece for pieces in heard for piece in pieces if isinstance(piece, CallPiece)]
    assert order[0] == CallPiece(0, id="id0", name="get_weather")
    assert len(order) > 20, "arguments must not wait for their end"
    assert "".join(piece.arguments_json for piece in order) == '{"city": "O\\"s}lo", "days": 2}'
    assert made.finish() == [] and made.has_calls


MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "get_time", "arguments": {',
    "}",
    '"',
    "\\",
]
OUTPUTS = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=6)), max_size=10).map("".join)


@given(text=OUTPUTS, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_tells_the_same(text: str, places: list[int]) -> None:
    whole, parts = splitter(), splitter()
    assert split([text], whole) == split(cut(text, places), parts)
    assert whole.has_calls == parts.has_calls


MISTRAL = ["[TOOL_CALLS]", "get_time[ARGS]{}", 'get_weather[ARGS]{"city": "x"}', "[ARGS]", "{", "}", '"']


@given(
    text=st.lists(st.one_of(st.sampled_from(MISTRAL), st.text(max_size=4)), max_size=8).map("".join),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_any_cut_tells_the_same_where_calls_have_no_end(text: str, places: list[int]) -> None:
    assert split([text], splitter(ALTERNATING)) == split(cut(text, places), splitter(ALTERNATING))


def behind_a_call(text: str, start: int) -> int | None:
    """Return where a call that begins at `start` ends, with its end marker where it has one; None for
    none."""
    if not text.startswith("<tool_call>", start):
        return None
    begun = text[start + len("<tool_call>") :]
    try:
        _, stop = json.JSONDecoder().raw_decode(begun, len(begun) - len(begun.lstrip()))
    except ValueError:
        return None
    return len(text) - len(begun[stop:].lstrip().removeprefix("</tool_call>"))


def accounts(text: str, emitted: list[str], place: int = 0) -> bool:
    """Whether all of `text` is markers, calls, and what was emitted, in order."""
    if place == len(text):
        return not emitted
    ends = [(place + len(emitted[0]), emitted[1:])] if emitted and text.startswith(emitted[0], place) else []
    ends += [(place + len(m), emitted) for m in ("<think>", "</think>") if text.startswith(m, place)]
    behind = behind_a_call(text, place)
    ends += [] if behind is None else [(behind, emitted)]
    return any(accounts(text, rest, stop) for stop, rest in ends)


@given(text=OUTPUTS)
def test_nothing_is_lost(text: str) -> None:
    """What is no marker comes out as text or reasoning, each call as a call, or whole as text."""
    made = splitter()
    pieces = [piece for part in text for piece in made.push(part)] + made.finish()
    emitted = [p.text for p in pieces if isinstance(p, (TextPiece, ReasoningPiece, MalformedPiece))]
    assert accounts(text, emitted)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{bad", "a string is missing"),
        ('{"name": "get_time", "arguments": {"a": tru}}', "a value that JSON does not allow"),
        ('{"arguments": {}}', "names no tool"),
        ('{"name": "", "arguments": {}}', "names no tool"),
        ('["get_time"]', "names no tool"),
        ('{"name": "get_time", "arguments": [1]}', "not a JSON object"),
        ('{"name": "get_time", "arguments": "soon"}', "text that is not JSON"),
        ('{"name": "get_time", "arguments": {"a": NaN}}', "a value that JSON does not allow"),
        ("[]", "no call in it"),
        (r'{"name": "get\_time", "arguments": {"a": 1}}', "an escape that JSON does not allow"),
    ],
)
def test_a_malformed_call_is_text_with_a_flag(section: str, problem: str) -> None:
    made = splitter()
    pieces = split([f"a<tool_call>{section}</tool_call>b"], made)
    (malformed,) = [piece for piece in pieces if isinstance(piece, MalformedPiece)]
    assert malformed.text == f"<tool_call>{section}</tool_call>" and problem in malformed.problem
    assert calls_of(pieces) == [] and not made.has_calls
    assert (pieces[0], pieces[-1]) == (TextPiece("a"), TextPiece("b"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("get_time", '{"a": "x\\ud800"}'), ("get_time", '{"\\udfff": 1}'), ("get_time\\ud800", "{}")],
)
def test_half_a_surrogate_pair_can_be_sent(name: str, arguments: str) -> None:
    pieces = split([f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'], splitter())
    for piece in pieces:
        for value in dataclasses.asdict(piece).values():
            assert not isinstance(value, str) or value.encode("utf-8") is not None
    assert any(isinstance(piece, MalformedPiece) for piece in pieces) is (name != "get_time")


def test_a_call_that_was_being_emitted_is_withdrawn_when_it_breaks() -> None:
    pieces = split(
        ['<tool_call>{"name": "get_time", "arguments": {"a": 1}} trailing</tool_call>'], splitter()
    )
    assert pieces[0] == CallPiece(0, id="id0", name="get_time")
    assert pieces[2] == CallPiece(0, is_withdrawn=True) and isinstance(pieces[3], MalformedPiece)


def test_a_call_that_says_two_things_is_malformed_and_the_next_one_is_not() -> None:
    twice = '{"name": "get_time", "arguments": {"a": 1}, "arguments": {"a": 2}}'
    made = splitter()
    pieces = split([f"<tool_call>{twice}</tool_call>{CALL}"], made)
    assert calls_of(pieces) == [("get_weather", {"city": 'O"s}lo', "days": 2})]
    assert [p.index for p in pieces if isinstance(p, CallPiece) and p.name] == [0, 1] and made.has_calls
    assert [p.problem for p in pieces if isinstance(p, MalformedPiece)] == ["it has two sets of arguments"]


@pytest.mark.parametrize("section", ['{"name": "get_time", "arguments": {}}', '{"name": "get_ti'])
def test_an_output_may_end_inside_a_call(section: str) -> None:
    pieces = split([f"<tool_call>{section}"], splitter())
    if section.endswith("}"):
        assert calls_of(pieces) == [("get_time", {})]
    else:
        (malformed,) = pieces
        assert malformed.text == f"<tool_call>{section}" and "ended inside" in malformed.problem


def test_calls_side_by_side_are_numbered() -> None:
    pieces = split([CALL + "\n" + CALL], splitter())
    assert [p.id for p in pieces if isinstance(p, CallPiece) and p.name] == ["id0", "id1"]


def test_several_calls_of_one_section_are_emitted_one_by_one() -> None:
    made = splitter(ALTERNATING)
    pieces = split(['[TOOL_CALLS]get_time[ARGS]{}get_weather[ARGS]{"city": "Oslo"}'], made)
    assert calls_of(pieces) == [("get_time", {}), ("get_weather", {"city": "Oslo"})] and made.has_calls


def test_a_list_of_calls_has_the_models_own_ids() -> None:
    text = '[TOOL_CALLS] [{"name": "get_time", "arguments": {}, "id": "own000001"}]'
    pieces = split([text], splitter(ALTERNATING))
    assert pieces[0] == CallPiece(0, id="own000001", name="get_time")


def test_without_tools_a_call_is_text() -> None:
    assert split([CALL], splitter(tools=())) == [TextPiece(CALL)]
    assert (
        tokenizer_of(ALTERNATING).reply_splitter(Conversation(ASKED), RenderedChat(()), make_call_id=str)
        is None
    )


def test_what_the_prompt_began_goes_on() -> None:
    opening = '<tool_call>\n{"name": "get_time", "arguments": '
    made = splitter(rendered=RenderedChat((), opening=opening))
    assert calls_of(split(["{}", "}\n</tool_call>"], made)) == [("get_time", {})]
    thinking = splitter(rendered=RenderedChat((), is_reasoning=True))
    assert split(["hm</think>yes"], thinking) == [ReasoningPiece("hm"), TextPiece("yes")]


def test_a_section_longer_than_the_parsers_may_read_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icehouse_server.text.replies.notation.SECTION_LENGTH_LIMIT", 40)
    (malformed,) = [piece for piece in split([CALL], splitter()) if isinstance(piece, MalformedPiece)]
    assert "longer than 40" in malformed.problem and CALL.startswith(malformed.text)


@pytest.mark.parametrize("family", [HEADERS, SYSTEMLESS], ids=["headers", "systemless"])
def test_a_model_without_markers_needs_no_splitter(family: Family) -> None:
    found = tokenizer_of(family).reply_splitter(Conversation(ASKED), RenderedChat(()), make_call_id=str)
    assert found is None


def test_markers_that_decoding_hides_are_known() -> None:
    with_tools, without = Conversation(ASKED, tools=TOOLS), Conversation(ASKED)
    assert tokenizer_of(ALTERNATING).hides_markers(with_tools)
    assert not tokenizer_of(ALTERNATING).hides_markers(without)
    assert not tokenizer_of(REMEMBERING).hides_markers(with_tools)
    tokenizer = tokenizer_of(ALTERNATING)
    ids = tokenizer._encode("[TOOL_CALLS]a[ARGS]{}<eos><pad>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a{}" and tokenizer.decode_with_markers(ids) == "[TOOL_CALLS]a[ARGS]{}"


@pytest.mark.parametrize("mark", ["[", '{"a":'])
@pytest.mark.parametrize("is_quoted", [True, False])
def test_arguments_nested_too_deep_are_a_malformed_call(mark: str, is_quoted: bool) -> None:
    deep = json.dumps(mark * 5_000) if is_quoted else mark * 5_000
    pieces = split([f'<tool_call>\n{{"name": "get_weather", "arguments": {deep}}}\n</tool_call>'], splitter())
    assert isinstance(pieces[-1], MalformedPiece)
