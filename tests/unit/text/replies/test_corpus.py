"""The corpus: replies of every family as they are written, and what they say, however they are cut."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.text.reasoning import ReasoningCounter, ReplyReasoning

from tests.fixtures.chat.notations import WRITERS
from tests.fixtures.chat.reply_pieces import cut_at, events, in_pieces, read
from tests.unit.text.replies.test_families import TOOLS

FOLDER = Path(__file__).parent / "corpus"
CORPUS: dict[str, list[dict[str, Any]]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))
}
EVERY = pytest.mark.parametrize("family", CORPUS)


def test_every_family_has_ten_replies() -> None:
    assert sorted(CORPUS) == sorted(WRITERS)
    assert all(len(replies) >= 10 for replies in CORPUS.values())


@EVERY
def test_a_reply_says_what_it_says_in_any_pieces(family: str) -> None:
    for reply in CORPUS[family]:
        text = reply["text"]
        random_cut = cut_at(text, random.Random(len(text)).sample(range(10_000), 9))
        for pieces in ([text], *(in_pieces(text, size) for size in (1, 2, 3, 7)), random_cut):
            said = events(read(WRITERS[family].format, pieces, TOOLS))
            assert said == reply["events"], f"{reply['about']}: {pieces}"


@EVERY
def test_what_counts_reasoning_finds_the_same_thoughts(family: str) -> None:
    for reply, size in itertools.product(CORPUS[family], (0, 1, 5)):
        text = reply["text"]
        counter = ReasoningCounter(ReplyReasoning(WRITERS[family].format, reads_calls=True))
        found = [span for piece in in_pieces(text, size) for span in counter.read(piece)]
        thought = "".join(text[span.start : span.stop] for span in found)
        thoughts = "".join(event[1] for event in reply["events"] if event[0] == "think")
        assert thought == thoughts, f"{reply['about']}: in pieces of {size}"


@pytest.mark.slow
@EVERY
def test_no_part_of_a_reply_is_emitted_as_the_whole(family: str) -> None:
    for reply in CORPUS[family]:
        whole = [event[1:] for event in reply["events"] if event[0] in ("call", "repaired")]
        for stop in range(len(reply["text"])):
            found = events(read(WRITERS[family].format, [reply["text"][:stop]], TOOLS, is_cut=True))
            emitted = [event[1:] for event in found if event[0] in ("call", "repaired")]
            assert emitted == whole[: len(emitted)], reply["text"][:stop]
