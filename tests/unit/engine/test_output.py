"""Any Unicode, any tokens, any cut: nothing lost, nothing split, nothing leaked, tokens in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from icehouse_server.domain.events import Delta, Finished, FinishReason
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import TokenLogprobs
from icehouse_server.engine.core.ports import Drawn
from icehouse_server.engine.core.sequence import Sequence as EngineSequence
from icehouse_server.engine.output import Output
from icehouse_server.text.detokenizer import Detokenizer, StopFilter
from tokenizers import Tokenizer

from tests.fixtures.engine import Recorder, request
from tests.fixtures.models.vocabulary import EOS_ID, byte_fallback_tokenizer, tokenizer

BYTE_LEVEL, BYTE_FALLBACK = tokenizer(), byte_fallback_tokenizer()
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK}
REPLACEMENT = "\ufffd"
LONGEST_DECODED = 40
"""Tokens decoded at once at most, however long the output: that keeps its cost per token flat."""

each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
# No U+FFFD: it stands for bytes that are no character, and these texts have none.
texts = st.text(st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]), max_size=60)
spaced = st.text(alphabet="the in a,.é🧊語 \n", max_size=60)
few_stops = st.lists(st.text(alphabet="the é🧊", min_size=1, max_size=4), max_size=3)


def decoder(built: Tokenizer) -> Callable[[Sequence[int]], str]:
    def decode(token_ids: Sequence[int]) -> str:
        assert len(token_ids) <= LONGEST_DECODED, "the window grows with the output"
        return built.decode(list(token_ids), skip_special_tokens=True)

    return decode


def pieces_of(built: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decoder(built), prompt)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, character by character: the first stop that is complete, the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@each_tokenizer
@given(text=texts | spaced, cut=st.integers(min_value=0, max_value=400))
@example(text="🧊🧊🧊🧊a", cut=14)
@example(text="  the", cut=0)
def test_prompt_and_output_cut_anywhere_add_up(name: str, text: str, cut: int) -> None:
    built = TOKENIZERS[name]
    ids = built.encode(text, add_special_tokens=False).ids
    prompt, output = ids[:cut], ids[cut:]
    whole = built.decode(ids)
    # What of the prompt is whole characters; the output brings the rest of the last one.
    known = next(
        t for k in range(4) if not (t := built.decode(prompt[: len(prompt) - k])).endswith(REPLACEMENT)
    )
    pieces = pieces_of(built, prompt, output)
    assert known + "".join(pieces) == whole
    assert not any(REPLACEMENT in piece for piece in pieces), "a character was split"


@each_tokenizer
@given(text=texts | spaced, cut=st.integers(min_value=0, max_value=400))
@example(text="a 🧊🧊 é🧊a", cut=0)
@example(text="🧊🧊", cut=2)
def test_a_token_begins_at_the_character_that_it_has_a_part_in(name: str, text: str, cut: int) -> None:
    built = TOKENIZERS[name]
    ids = built.encode(text, add_special_tokens=False).ids

    def whole_bytes(count: int) -> int:
        """Bytes of the whole characters of the first tokens; bytes of one that is not decode as U+FFFD."""
        return len(built.decode(ids[:count]).rstrip(REPLACEMENT).encode())

    # A decoder may take a run of byte tokens for garbage until its last character is whole.
    expected = [max(map(whole_bytes, range(count + 1))) for count in range(len(ids))]
    # A character that the prompt begins belongs to the output.
    known = max(map(whole_bytes, range(cut + 1)))
    detokenizer = Detokenizer(decoder(built), ids[:cut])
    found = []
    for token_id in ids[cut:]:
        found.append(detokenizer.next_offset)
        detokenizer.push(token_id)
    assert found == [offset - known for offset in expected[cut:]]


@given(text=texts, lengths=st.lists(st.integers(min_value=1, max_value=7), min_size=1))
@example(text="a 🧊x", lengths=[1, 3, 3])
@example(text="\x80\x80\x80𐀀𐀀0\x80\x80ࠀ𐀀", lengths=[1, 5, 2, 4, 1])
@example(text="ࠀ𐀀𐀀ࠀ", lengths=[1, 1, 1, 2, 1, 1, 2, 1, 1, 2])
def test_tokens_of_any_bytes_begin_at_their_first_character(text: str, lengths: list[int]) -> None:
    """Tokens that end inside a character, as those that begin with a space do in most vocabularies."""
    data = text.encode()
    starts = [0]
    while starts[-1] < len(data):
        starts.append(starts[-1] + lengths[len(starts) % len(lengths)])
    tokens = [data[a:b] for a, b in itertools.pairwise(starts)]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in token_ids).decode(errors="replace")

    detokenizer = Detokenizer(decode, [])
    found, pieces = [], []
    for token_id in range(len(tokens)):
        found.append(detokenizer.next_offset)
        pieces.append(detokenizer.push(token_id))
    characters = [len(text[:i].encode()) for i in range(len(text) + 1)]
    assert found == [max(place for place in characters if place <= start) for start in starts[:-1]]
    assert "".join([*pieces, detokenizer.flush()]) == text


@given(st.lists(st.integers(min_value=0, max_value=319), max_size=120))
@example(
    BYTE_LEVEL.encode("🧊", add_special_tokens=False).ids[-1:] * 7
    + BYTE_LEVEL.encode("🧊", add_special_tokens=False).ids
)
def test_any_bytes_give_what_decoding_all_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids)


@each_tokenizer
@given(ids=st.lists(st.integers(min_value=0, max_value=258), max_size=200))
def test_any_garbage_ends_and_stays_cheap(name: str, ids: list[int]) -> None:
    # `decoder` fails when the window grows; and what is held back comes in the end.
    built = TOKENIZERS[name]
    pieces = pieces_of(built, [], [*ids, *built.encode("a", add_special_tokens=False).ids])
    assert "".join(pieces).endswith("a")


@each_tokenizer
@pytest.mark.parametrize("prompt", ["", "the"])
def test_a_long_run_of_special_tokens_costs_little(name: str, prompt: str) -> None:
    built = TOKENIZERS[name]
    ids = built.encode("the", add_special_tokens=False).ids
    context = built.encode(prompt, add_special_tokens=False).ids
    expected = built.decode(context + ids)[len(prompt) :]
    assert "".join(pieces_of(built, context, [1] * 500 + ids + [1] * 500)) == expected


@given(
    st.text(alphabet="abc🧊", max_size=40),
    st.lists(st.text(alphabet="abc🧊", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@example("abcd", ["bcd", "c"], None)
@example("xab", ["ab", "xab"], None)
def test_any_cut_of_a_text_stops_at_the_same_place(text: str, stops: list[str], random) -> None:
    stop_filter = StopFilter(stops)
    sent, found, rest = "", None, text
    while rest and found is None:
        cut = random.randint(1, len(rest)) if random else len(rest)
        step = stop_filter.push(rest[:cut])
        rest = rest[cut:]
        sent += step.text
        found = step.stop_string
        assert not any(stop in sent for stop in stops), "a stop string leaked"
    if found is None:
        sent += stop_filter.flush()
    assert (sent, found) == cut_at_first_stop(text, stops)


def delivered(
    built: Tokenizer, output: Sequence[int], *, prompt: Sequence[int], stops: Sequence[str]
) -> tuple[list[Delta], Finished, int]:
    """Run tokens through Output as a decode step does; also return how many it took."""
    recorder = Recorder()
    delivery = Output(listener=recorder, eos_token_ids=frozenset([EOS_ID]))
    sequence = EngineSequence.of(
        request("r", prompt, max_output_tokens=len(output), stop=tuple(stops)),
        sequence_id=SequenceId(0),
        decode=decoder(built),
        context_token_limit=10_000,
    )
    end = None
    for token_id in output:
        assert end is None
        drawn = Drawn(sequence.sequence_id, token_id, TokenLogprobs(token_id, -1.0, 1))
        end = delivery.take_token(sequence, drawn, now=0.0)
        delivery.publish()
        if end is not None:
            break
    assert end is not None
    deltas = [event for event in recorder.events.get("r", []) if isinstance(event, Delta)]
    return deltas, end, len(sequence.output_token_ids)


@each_tokenizer
@given(text=spaced, stops=few_stops, prompt=spaced)
def test_deltas_are_the_text_before_the_first_stop_with_every_token_once(
    name: str, text: str, stops: list[str], prompt: str
) -> None:
    built = TOKENIZERS[name]
    prompt_ids = [1, *built.encode(prompt, add_special_tokens=False).ids]
    output = built.encode(text + "!", add_special_tokens=False).ids
    whole = built.decode([*prompt_ids, *output])[len(built.decode(prompt_ids)) :]
    deltas, end, taken_count = delivered(built, output, prompt=prompt_ids, stops=stops)
    assert ("".join(d.text for d in deltas), end.stop_string) == cut_at_first_stop(whole, stops)
    assert [token_id for d in deltas for token_id in d.token_ids] == list(output[:taken_count])
    told = [entry for d in deltas for entry in d.logprobs]
    assert [entry.token_id for entry in told] == list(output[:taken_count])
    offsets = [entry.text_offset or 0 for entry in told]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    parts = [whole.encode()[a:b].decode() for a, b in zip(offsets, [*offsets[1:], None], strict=True)]
    assert "".join(parts) == whole, "each part is whole characters"
    assert end.reason is (FinishReason.STOP_STRING if end.stop_string else FinishReason.LENGTH)


def test_the_end_token_is_told_unless_a_stop_string_came_before_it() -> None:
    ids = BYTE_LEVEL.encode("ab", add_special_tokens=False).ids
    deltas, end, taken_count = delivered(BYTE_LEVEL, [*ids, EOS_ID], prompt=[1], stops=[])
    assert ("".join(d.text for d in deltas), end.reason) == ("ab", FinishReason.STOP_TOKEN)
    assert (end.stop_token_id, taken_count) == (EOS_ID, len(ids) + 1)
    lead_byte = BYTE_LEVEL.encode("🧊", add_special_tokens=False).ids[0]
    _, end, _ = delivered(BYTE_LEVEL, [*ids, lead_byte, EOS_ID], prompt=[1], stops=["b" + REPLACEMENT])
    assert (end.stop_string, end.stop_token_id) == ("b" + REPLACEMENT, None)


def test_a_stop_that_only_the_end_completes_is_found() -> None:
    # The stop's last character is held as unfinished bytes until the output ends.
    ids = BYTE_LEVEL.encode("ab", add_special_tokens=False).ids
    lead_byte = BYTE_LEVEL.encode("🧊", add_special_tokens=False).ids[0]
    deltas, end, _ = delivered(BYTE_LEVEL, [*ids, lead_byte], prompt=[1], stops=["b" + REPLACEMENT])
    assert ("".join(d.text for d in deltas), end.stop_string) == ("a", "b" + REPLACEMENT)
