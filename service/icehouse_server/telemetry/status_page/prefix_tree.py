"""Prefix tree: the beginnings that prompts share, from the blocks that were used last.

Blocks that follow one another and are reused together are one node, as in a radix tree. Pure data, a
bounded number of nodes, and no tokens but where the blocks were asked for with theirs.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator

from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.ids import BlockHash
from icehouse_server.telemetry.status_page.excerpt import HEAD_TOKEN_LIMIT

NODE_LIMIT = 16
BRANCH_LIMIT = 4
"""Nodes shown below one."""
DEPTH_LIMIT = 6


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixNode:
    """Blocks one behind the other that are reused together."""

    hash: BlockHash
    """Of the last block, which stands for all before it."""
    start_token_index: int
    end_token_index: int
    block_count: int
    ram_block_count: int
    ssd_block_count: int
    hit_count: int
    """Prompts that reused its first block."""
    reused_token_total: int
    """Tokens that were not computed again thanks to these blocks."""
    branch_count: int
    """Known ways in which prompts go on behind it, those that were never reused included."""
    children: tuple[PrefixNode, ...]
    head: TokenKeys | None = dataclasses.field(default=None, repr=False)
    """Its first tokens, `HEAD_TOKEN_LIMIT` at most; None where those of its first block are not known."""

    @property
    def is_all_head(self) -> bool:
        """Whether it has no tokens behind its head."""
        return self.head is not None and len(self.head) == self.end_token_index - self.start_token_index


def shared_prefixes(blocks: Iterable[RecentBlock], *, node_limit: int = NODE_LIMIT) -> tuple[PrefixNode, ...]:
    """Return the trees of reused blocks that saved the most tokens, the greatest first."""
    return _Forest(blocks).nodes(node_limit)


class _Forest:
    """The blocks by parent, and what each saved together with all that follow it."""

    def __init__(self, blocks: Iterable[RecentBlock]) -> None:
        known = {block.hash: block for block in blocks}
        self._roots = [block for block in known.values() if block.parent not in known]
        self._children: dict[BlockHash, list[RecentBlock]] = collections.defaultdict(list)
        self._saved: collections.Counter[BlockHash] = collections.Counter()
        # A block begins where its parent ends, so its own sum is whole when it is added to the parent's.
        for block in sorted(known.values(), key=lambda block: -block.start_token_index):
            self._children[block.parent].append(block)
            self._saved[block.hash] += _saved_tokens(block)
            self._saved[block.parent] += self._saved[block.hash]

    def nodes(self, limit: int) -> tuple[PrefixNode, ...]:
        """Choose the nodes best first, so that no tree takes the place of a greater one's branches."""
        chosen: dict[BlockHash, list[RecentBlock]] = {}
        waiting = [(-self._saved[top.hash], 0, top.hash, top) for top in self._shared(self._roots)]
        heapq.heapify(waiting)
        while waiting and len(chosen) < limit:
            _, depth, _, first = heapq.heappop(waiting)
            chosen[first.hash] = run = self._run(first)
            if depth + 1 < DEPTH_LIMIT:
                for child in self._shared(self._children[run[-1].hash])[:BRANCH_LIMIT]:
                    heapq.heappush(waiting, (-self._saved[child.hash], depth + 1, child.hash, child))
        return tuple(self._built(self._roots, chosen))

    def _shared(self, blocks: Iterable[RecentBlock]) -> list[RecentBlock]:
        """Return those that were reused, the one below which most tokens were saved first."""
        reused = [block for block in blocks if block.hit_count]
        return sorted(reused, key=lambda block: (-self._saved[block.hash], block.hash))

    def _run(self, first: RecentBlock) -> list[RecentBlock]:
        """Return a block and those behind it, as long as there is one way on that half of its prompts go."""
        run = [first]
        while len(behind := self._children[run[-1].hash]) == 1 and 2 * behind[0].hit_count >= first.hit_count:
            run.append(behind[0])
        return run

    def _built(
        self, blocks: Iterable[RecentBlock], chosen: dict[BlockHash, list[RecentBlock]]
    ) -> Iterator[PrefixNode]:
        for first in self._shared(blocks):
            if (run := chosen.get(first.hash)) is None:
                continue
            behind = self._children[run[-1].hash]
            yield PrefixNode(
                hash=run[-1].hash,
                start_token_index=first.start_token_index,
                end_token_index=run[-1].end_token_index,
                block_count=len(run),
                ram_block_count=sum(block.is_in_ram for block in run),
                ssd_block_count=sum(block.is_on_ssd for block in run),
                hit_count=first.hit_count,
                reused_token_total=sum(_saved_tokens(block) for block in run),
                branch_count=len(behind),
                children=tuple(self._built(behind, chosen)),
                head=_head(run),
            )


def _saved_tokens(block: RecentBlock) -> int:
    return block.token_count * block.hit_count


def _head(run: list[RecentBlock]) -> TokenKeys | None:
    """Return the first tokens of these blocks, as far as they are known."""
    if run[0].token_keys is None:
        return None
    known = itertools.takewhile(lambda keys: keys is not None, (block.token_keys for block in run))
    return tuple(
        itertools.islice(itertools.chain.from_iterable(keys or () for keys in known), HEAD_TOKEN_LIMIT)
    )
