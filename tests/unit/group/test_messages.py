"""Messages of a group: what a follower gets is what rank 0 has."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.domain.blocks import BlockHeader, RegionKind
from icehouse_server.domain.ids import AdapterName, BlockHash, Fingerprint, SequenceId
from icehouse_server.domain.request import LogprobsWanted, Pooling, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.group.messages import (
    chunk_from,
    chunk_message,
    header_from,
    header_message,
    planned_from,
    planned_messages,
)
from icehouse_server.storage.api import PlannedBlock

OURS, THEIRS = Fingerprint(b"o" * 32), Fingerprint(b"t" * 32)
NAMES = st.binary(min_size=32, max_size=32).map(BlockHash)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
HEADERS = st.builds(
    BlockHeader,
    hash=NAMES,
    parent=NAMES,
    fingerprint=st.just(OURS),
    start_token_index=st.integers(0, 2**31 - 1),
    token_ids=TOKENS.map(tuple),
    block_token_limit=st.integers(1, 4096),
)
PLANNED = st.builds(PlannedBlock, HEADERS, st.frozensets(st.sampled_from(RegionKind)))
ROWS = st.builds(
    DecodeRow,
    st.just(SamplingParams(temperature=0.7, seed=3)),
    prompt_token_ids=TOKENS.filter(bool).map(tuple),
    output_token_ids=TOKENS.map(tuple),
    speculation=st.none() | st.builds(Speculation, st.integers(1, 9), st.integers(1, 9)),
)
CHUNKS = st.builds(
    Chunk,
    st.integers(-(2**40), 2**40).map(SequenceId),
    TOKENS.filter(bool),
    st.text(max_size=9).map(AdapterName),
    row=st.none() | ROWS,
    next_token_ids=TOKENS,
    wanted=st.none() | st.just(LogprobsWanted()),
    pooling=st.none() | st.sampled_from(Pooling),
)


def sent(message: Any) -> Any:
    """Return a message as it comes over the wire."""
    return type(message).FromString(message.SerializeToString())


@given(HEADERS)
def test_a_header_is_the_same_under_the_ranks_own_fingerprint(header: BlockHeader) -> None:
    come = header_from(sent(header_message(header)), THEIRS)
    assert come == dataclasses.replace(header, fingerprint=THEIRS)


@given(st.lists(PLANNED, max_size=4))
def test_what_is_read_is_the_same(blocks: list[PlannedBlock]) -> None:
    message = group.BeginLoad(blocks=planned_messages(blocks))
    come = planned_from(sent(message).blocks, THEIRS)
    assert [each.regions for each in come] == [each.regions for each in blocks]
    assert [each.header.hash for each in come] == [each.header.hash for each in blocks]


@given(CHUNKS, st.booleans())
def test_a_chunk_has_what_a_pass_needs(chunk: Chunk, is_guessing: bool) -> None:
    sequence: Any = SimpleNamespace(is_guessing=is_guessing)
    come = chunk_from(sent(chunk_message(sequence, chunk)))
    assert come.sequence_id == chunk.sequence_id
    assert list(come.token_ids) == list(chunk.token_ids)
    assert come.adapter == chunk.adapter
    assert (come.row is None) == (chunk.row is None)
    assert come.pooling == chunk.pooling
    wants = chunk.wanted is not None
    assert list(come.next_token_ids) == (list(chunk.next_token_ids) if wants else [])
    assert (come.wanted is not None) == (wants and bool(chunk.next_token_ids))
    if chunk.row is not None and come.row is not None:
        guesses = chunk.row.speculation is not None and is_guessing
        assert come.row.speculation == (chunk.row.speculation if guesses else None)
        if guesses:
            known = (*chunk.row.prompt_token_ids, *chunk.row.output_token_ids)
            assert come.row.prompt_token_ids == known
