"""Messages of a group: chunks, blocks and their headers, and counters of tiers, as protos and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.domain.blocks import BlockHeader, RegionKind
from icehouse_server.domain.ids import AdapterName, BlockHash, Fingerprint, SequenceId
from icehouse_server.domain.request import LogprobsWanted, Pooling, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.domain.stats import RankTierStats
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner.decoding import OpenSequence
from icehouse_server.storage.api import PlannedBlock


def chunk_message(sequence: OpenSequence, chunk: Chunk) -> group.Chunk:
    """Return what a follower needs of a chunk: not how tokens are drawn, because it takes rank 0's."""
    message = group.Chunk(
        sequence_id=chunk.sequence_id,
        token_ids=chunk.token_ids,
        adapter=chunk.adapter,
        draws=chunk.row is not None,
        next_token_ids=chunk.next_token_ids if chunk.wanted is not None else (),
        pooling=0 if chunk.pooling is None else chunk.pooling.value,
    )
    if chunk.row is not None and chunk.row.speculation is not None and sequence.is_guessing:
        message.lookup.draft_token_limit = chunk.row.speculation.draft_token_limit
        message.lookup.ngram_token_limit = chunk.row.speculation.ngram_token_limit
        message.lookup.token_ids.extend(chunk.row.prompt_token_ids)
        message.lookup.token_ids.extend(chunk.row.output_token_ids)
    return message


def chunk_from(message: group.Chunk) -> Chunk:
    """Return the chunk that a follower runs."""
    speculation: Speculation | None = None
    known: tuple[int, ...] = (0,)
    if message.HasField("lookup"):
        lookup = message.lookup
        known = tuple(lookup.token_ids)
        speculation = Speculation(lookup.draft_token_limit, lookup.ngram_token_limit)
    row = DecodeRow(SamplingParams(), prompt_token_ids=known, speculation=speculation)
    return Chunk(
        SequenceId(message.sequence_id),
        list(message.token_ids),
        AdapterName(message.adapter),
        row=row if message.draws else None,
        next_token_ids=list(message.next_token_ids),
        wanted=LogprobsWanted() if message.next_token_ids else None,
        pooling=Pooling(message.pooling) if message.pooling else None,
    )


def header_message(header: BlockHeader) -> group.Header:
    """Return a block's header without its fingerprint, which differs between ranks."""
    return group.Header(
        hash=header.hash,
        parent=header.parent,
        start_token_index=header.start_token_index,
        token_ids=header.token_ids,
        block_token_limit=header.block_token_limit,
    )


def header_from(message: group.Header, fingerprint: Fingerprint) -> BlockHeader:
    """Return the header of a block on a rank with this fingerprint."""
    return BlockHeader(
        hash=BlockHash(message.hash),
        parent=BlockHash(message.parent),
        fingerprint=fingerprint,
        start_token_index=message.start_token_index,
        token_ids=tuple(message.token_ids),
        block_token_limit=message.block_token_limit,
    )


def planned_messages(blocks: Iterable[PlannedBlock]) -> list[group.Planned]:
    """Return what is read of each block."""
    return [group.Planned(header=header_message(each.header), kinds=sorted(each.regions)) for each in blocks]


def planned_from(messages: Sequence[group.Planned], fingerprint: Fingerprint) -> list[PlannedBlock]:
    """Return what a rank with this fingerprint reads."""
    return [
        PlannedBlock(header_from(each.header, fingerprint), frozenset(map(RegionKind, each.kinds)))
        for each in messages
    ]


def names_from(names: Iterable[bytes]) -> tuple[BlockHash, ...]:
    """Return names of blocks."""
    return tuple(map(BlockHash, names))


def tier_report(stats: RankTierStats) -> group.TierReport:
    """Return a follower's report about its tier."""
    return group.TierReport(**dataclasses.asdict(stats))


def tier_from(report: group.TierReport) -> RankTierStats:
    """Return the counters in a follower's report about its tier, none of them negative."""
    names = (field.name for field in dataclasses.fields(RankTierStats))
    return RankTierStats(**{name: max(0, getattr(report, name)) for name in names})
