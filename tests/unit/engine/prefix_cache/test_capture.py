"""Which regions a block is captured with, by where the sequence stands."""

from __future__ import annotations

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.capture import captured_kinds
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.text.detokenizer import TextStream

from tests.fixtures.engine import decode_ascii, request
from tests.fixtures.known_blocks import settings

KV, WINDOW, CHECKPOINT = RegionKind.KV, RegionKind.WINDOW, RegionKind.CHECKPOINT


def sequence_at(position: int, *, prompt_count: int = 100, output_count: int = 0) -> Sequence:
    """Return a sequence whose KV reaches `position`; decoding when it has output."""
    asked = request("r", tuple(range(prompt_count)))
    text = TextStream(decode=decode_ascii, prompt_token_ids=asked.prompt_token_ids, stops=())
    made = Sequence(SequenceId(0), asked, text, output_token_limit=50)
    made.processed_token_count = position
    made.phase = Phase.DECODING if output_count else Phase.PREFILLING
    made.output_token_ids = list(range(output_count))
    made.fed_ahead_count = 1
    return made


def kinds_at(sequence: Sequence, stop: int, reached: int, *, facts: CacheFacts) -> list[RegionKind]:
    rules = settings(checkpoint_interval_tokens=16)
    return captured_kinds(rules, facts, sequence, stop=stop, reached=reached)


def test_kv_alone() -> None:
    assert kinds_at(sequence_at(8), 4, 8, facts=CacheFacts()) == [KV]
    assert kinds_at(sequence_at(8), 8, 8, facts=CacheFacts()) == [KV]


def test_windows_are_held_back_through_a_prefill() -> None:
    facts = CacheFacts(window_token_count=6)
    assert kinds_at(sequence_at(12), 4, 12, facts=facts) == [KV, WINDOW]


@pytest.mark.parametrize(("window", "has_window"), [(6, True), (5, True), (4, False), (3, False)])
def test_a_window_one_token_late(window: int, has_window: bool) -> None:
    # The prompt ends with a block, which is complete only when the first step has drawn a token too.
    sequence = sequence_at(7, prompt_count=8, output_count=1)
    assert sequence.kv_token_count == 9
    kinds = kinds_at(sequence, 8, 9, facts=CacheFacts(window_token_count=window))
    assert (WINDOW in kinds) is has_window


@pytest.mark.parametrize(
    ("position", "prompt_count", "is_taken"),
    [
        (16, 100, True),  # the interval
        (32, 100, True),
        (12, 100, False),
        (96, 100, True),  # the last full block of the 99 tokens that are prefilled
        (99, 100, True),  # the prompt's end but one
        (92, 100, False),
        (12, 13, True),
        (8, 12, True),
    ],
)
def test_where_a_checkpoint_is_taken(position: int, prompt_count: int, is_taken: bool) -> None:
    facts = CacheFacts(needs_checkpoint=True)
    kinds = kinds_at(sequence_at(position, prompt_count=prompt_count), position, position, facts=facts)
    assert (CHECKPOINT in kinds) is is_taken and kinds[0] is KV


def test_a_checkpoint_is_of_now_or_not_at_all() -> None:
    facts = CacheFacts(has_kv=False, needs_checkpoint=True)
    assert kinds_at(sequence_at(32), 16, 32, facts=facts) == []
    assert kinds_at(sequence_at(32), 32, 32, facts=facts) == [CHECKPOINT]


def test_all_three_in_the_order_of_the_file() -> None:
    facts = CacheFacts(needs_checkpoint=True, window_token_count=6)
    assert kinds_at(sequence_at(16), 16, 16, facts=facts) == [KV, WINDOW, CHECKPOINT]
