"""Watches a server's KV events as gateways do, and compares the gateways' knowledge with the index."""

from __future__ import annotations

import random
from collections.abc import Iterable

from icehouse_server.domain.blocks import pack_tokens, split_keys
from icehouse_server.domain.cache_commands import CacheAnswer, Tier
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.mailbox import Command
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.kv_events.block_mirror import BlockImage, BlockMirror, cut, images_of
from icehouse_server.rpc.kv_events.event_feed import EventFeed
from icehouse_server.rpc.kv_events.kv_event_source import LogFollower, Question

from tests.fixtures.kv_events import Gateway, Known
from tests.system.sim.ledger import Ledger
from tests.system.sim.server import SimServer
from tests.system.sim.setup import BLOCK

_READERS = (None, Tenant(""), Tenant("other"))
_SETTLE_LIMIT = 5_000
Tokens = tuple[bytes, tuple[BlockImage, ...]]


class EventWatch:
    """For one life of a server: the event source, and gateways that read now and then."""

    def __init__(self, served: SimServer, ledger: Ledger, dice: random.Random) -> None:
        self._served = served
        self._ledger = ledger
        self._dice = dice
        self._mirror = BlockMirror(block_token_count=BLOCK, block_limit=100_000)
        self.feed = EventFeed(
            self._mirror, replay_limit_bytes=dice.choice((600, 5_000, 1_000_000)), clock=served.clock
        )
        # The log is sometimes full: a listing's slices fit into it, the changes of a few steps do not.
        served.controller.commands.listing_slice_count = 4
        served.cache.tree.log._limit = dice.choice((16, 16_384))
        self._follower = LogFollower(served.cache.tree.log, self._mirror, self.feed)
        self._follower.begin(Tenant("other"))
        self._gateways = [Gateway(self.feed, tenant) for tenant in _READERS]
        self._is_asking = False

    def look(self) -> None:
        """Now and then publish, ask, and let a gateway read."""
        chance = self._dice.random()
        if chance < 0.5:
            self._turn()
        elif chance < 0.7:
            self._dice.choice(self._gateways).read(limit=self._dice.choice((1, 3, 1000)))
        elif chance < 0.73:
            self._dice.choice(self._gateways).reconnect()

    def check(self) -> None:
        """Assert at rest that every gateway knows the index's blocks, and no other tenant's."""
        self._settle()
        expected = self._expected()
        late = [Gateway(self.feed, tenant) for tenant in _READERS]
        for gateway in (*self._gateways, *late):
            gateway.read(limit=None)
            mine = {key for key in expected if gateway.tenant in (None, key.scope.tenant)}
            known = gateway.known
            assert known == mine, f"{gateway.tenant!r}: missing {mine - known}, too many {known - mine}"
        self._ledger.seen["events"] += self.feed.event_total
        self._ledger.seen["events lost"] += sum(gateway.lost_count for gateway in self._gateways)
        self._ledger.seen["listings"] += sum(gateway.cleared_count for gateway in self._gateways)

    def _turn(self) -> None:
        while self._follower.turn():
            pass
        if not self._is_asking and (question := self._follower.question()) is not None:
            self._is_asking = True
            self._served.mailbox.post(Command(question, lambda answer: self._answered(question, answer)))

    def _answered(self, question: Question, answer: CacheAnswer | IcehouseError) -> None:
        self._is_asking = False
        self._follower.answer(question, answer)

    def _settle(self) -> None:
        for _ in range(_SETTLE_LIMIT):
            self._turn()
            if not self._is_asking:
                return
            self._served.come_to_rest()
        raise AssertionError("the follower never has enough")

    def _expected(self) -> set[Known]:
        """Return what the gateways should know: the full blocks of known tenants' unbroken chains."""
        index = self._served.cache.tree
        scopes = dict(index.log._scopes)
        found: set[Known] = set()
        for entry in index:
            chain = _chain(index.get, entry)
            scope = scopes.get(chain[-1].parent)
            if scope is None or chain[-1].start_token_index:
                continue
            if all(self._is_told(each) for each in chain):
                found |= set(_known(entry, scope, self._tokens(entry)))
        return found

    def _is_told(self, entry: Node) -> bool:
        if not (entry.ram or entry.ssd) or entry.token_count != BLOCK:
            return False
        if self._tokens(entry) is not None:
            return True
        excused = entry.hash in self._ledger.ever_damaged or self._ledger.io_errors(self._served)
        assert excused, f"the tokens of a sound block were never read: {entry}"
        return False

    def _tokens(self, entry: Node) -> Tokens | None:
        known = self._mirror._known.get(entry.hash)
        if entry.token_ids is not None:
            token_ids, extra = split_keys(entry.token_ids)
            self._ledger.seen["blocks with images told"] += bool(extra)
            return pack_tokens(token_ids), images_of(extra)
        return None if known is None or known.packed is None else (known.packed, known.images)


def _chain(get: object, entry: Node) -> list[Node]:
    assert callable(get)
    chain = [entry]
    while (above := get(chain[-1].parent)) is not None:
        chain.append(above)
    return chain


def _known(entry: Node, scope: CacheScope, tokens: Tokens | None) -> Iterable[Known]:
    assert tokens is not None
    parent = None if entry.start_token_index == 0 else cut(BlockHash(entry.parent))
    if entry.ram:
        yield Known(cut(entry.hash), parent, *tokens, scope, Tier.RAM)
    if entry.ssd:
        yield Known(cut(entry.hash), parent, *tokens, scope, Tier.SSD)
