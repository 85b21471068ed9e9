"""Watch of block use, from outside: which blocks a session's end may move and its limit may drop."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

from icehouse_server.domain.cache_commands import SessionEndReport
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.reuse_plan import Plan
from icehouse_server.engine.prefix_cache.tiers.matching import match
from icehouse_server.engine.prefix_cache.tiers.node import Node

from tests.system.sim.ledger import Ledger
from tests.system.sim.server import SimServer

PARENTS = {"two": "one"}
"""Each child session with its parent."""


class SessionWatch:
    """Watches one server's plans and captures."""

    def __init__(self, served: SimServer, ledger: Ledger) -> None:
        self._cache, self._ledger = served.cache, ledger
        self._users: collections.defaultdict[Node, set[Hashable]] = collections.defaultdict(set)
        self._capturing: tuple[Sequence, int] | None = None
        self._plan, self._capture = self._cache.plan, self._cache.capture
        self._end_session, self._drop_checkpoint = self._cache.end_session, self._cache._drop_checkpoint
        vars(self._cache).update(
            plan=self._watch_plan,
            capture=self._watch_capture,
            end_session=self._watch_end,
            _drop_checkpoint=self._watch_drop,
        )

    def _watch_end(self, tenant: Tenant, session_id: str) -> SessionEndReport:
        """Assert that the end of a session moves no block that others have used in the order of eviction."""
        order = self._cache.tree.ram.oldest
        before = list(order())
        ended = self._end_session(tenant, session_id)
        ending = {session_id, *(child for child, parent in PARENTS.items() if parent == session_id)}
        own = {(tenant, name) for name in ending}
        others = {node for node in before if self._users[node] - own}
        after = [node for node in order() if node in others]
        assert after == [node for node in before if node in others], f"the end of {session_id} moved others"
        self._ledger.seen["moved by the end of a session"] += list(order()) != before
        return ended

    def _watch_plan(self, sequence: Sequence, **how: Any) -> Plan:
        made = self._plan(sequence, **how)
        self._note(sequence, made.nodes)
        return made

    def _watch_capture(self, sequence: Sequence, reached: int, *, is_end: bool) -> list[Any]:
        self._capturing = sequence, reached
        names = self._capture(sequence, reached, is_end=is_end)
        self._capturing = None
        tree = self._cache.tree
        if names:
            nodes = [node for name in (*sequence.chain, *names) if (node := tree.get(name)) is not None]
            self._note(sequence, nodes)
            self._users = collections.defaultdict(
                set, {node: users for node, users in self._users.items() if tree.get(node.hash) is node}
            )
        return names

    def _note(self, sequence: Sequence, nodes: Any) -> None:
        for node in nodes:
            self._users[node].add(_user_of(sequence.request))

    def _watch_drop(self, node: Node) -> None:
        assert self._capturing is not None, "a checkpoint went, and none came"
        sequence, reached = self._capturing
        request = sequence.request
        mine = {_user_of(request)}
        for pair in PARENTS.items():
            mine |= {(request.tenant, name) for name in pair} if request.session_id in pair else set()
        self._ledger.seen["dropped checkpoint"] += 1
        assert not node.is_pinned and not self._users[node] - mine, f"{node} is not this session's alone"
        keys = request.keys(request.prompt_token_ids)[: reached + 1]
        found = match(
            self._cache.tree,
            self._cache.prompt(keys, scope=request.scope),
            with_ssd=self._cache.storage is not None,
        )
        assert not found.nodes or found.nodes[-1] is not node, f"{node} is what this prompt resumes from"
        self._drop_checkpoint(node)


def _user_of(request: GenerationRequest) -> Hashable:
    return (request.tenant, request.session_id) if request.session_id else request.request_id
