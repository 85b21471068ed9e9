"""Sessions: which blocks one conversation alone has used, so that they go first once it has ended.

Inference thread only, pure data, no mlx. A session is known by a hash of its tenant and its name, and the
name is kept nowhere. `Node.session` says which session computed a block, as long as nobody else has used it.
What is remembered beside that is bounded, and to forget it costs nothing but the order of eviction.

A session may have a parent: the agent that started it. The two, and whatever else that agent started, are a
family, and blocks that several of a family have used are its parent's. Families have two generations: who
names a child as its parent joins the child's parent. So no chain of names leads anywhere far, or around.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_stats import SessionStats
from icehouse_server.domain.ids import BlockHash, SessionKey, Tenant
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree

SESSION_LIMIT = 4096
"""Sessions that are remembered, of all tenants; the tenant with the most forgets one first."""
END_LIMIT = 32
"""Ends of a session's chains that are remembered: its own, and those of its forks and subagents."""

_KEY_BYTES = 16
_HASH_KEY_LIMIT = 64
"""Longest key that BLAKE2b takes, in bytes."""


@dataclasses.dataclass(slots=True)
class _Session:
    """What is remembered of one session. The names may be of blocks that are gone."""

    tenant: Tenant
    parent: SessionKey | None = None
    """A session that has none itself."""
    children: dict[SessionKey, None] = dataclasses.field(default_factory=dict)
    is_ended: bool = False
    ends: dict[BlockHash, None] = dataclasses.field(default_factory=dict)
    """The last blocks of its chains, in the order in which they were computed."""
    checkpoints: dict[BlockHash, int] = dataclasses.field(default_factory=dict)
    """Blocks with checkpoints that count for it, each with the number of the request that used it last; none
    without a budget."""


class Sessions:
    """A bounded book of sessions. `SessionKey` includes the tenant, so that no tenant reaches another's."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._secret = tree.settings.name_secret[:_HASH_KEY_LIMIT]
        self._checkpoint_limit = tree.settings.session_checkpoint_limit
        self.session_limit = SESSION_LIMIT
        self._known: dict[SessionKey, _Session] = {}
        self._of: dict[Tenant, OrderedDict[SessionKey, None]] = {}
        """Each tenant's sessions, the least recently used first."""
        self._request_number = 0
        self._stats = SessionStats()

    def __len__(self) -> int:
        return len(self._known)

    def key_of(self, tenant: Tenant, session_id: str) -> SessionKey | None:
        """Return what a tenant's session is known by; None for a request without one."""
        if not session_id:
            return None
        # A session's name has no zero byte, so that no two pairs are spelled alike.
        spelled = f"{session_id}\0{tenant}".encode()
        return SessionKey(hashlib.blake2b(spelled, key=self._secret, digest_size=_KEY_BYTES).digest())

    def note_use(
        self,
        tenant: Tenant,
        key: SessionKey | None,
        nodes: Sequence[Node],
        *,
        parent: SessionKey | None = None,
    ) -> None:
        """Record that a request begins with this chain, and resumes from its end; who started its session."""
        if key is not None:
            self._open(tenant, key)
            if parent is not None:
                self._join(tenant, key, parent)
        self.share(key, nodes)
        self._request_number += 1
        owner = None if not nodes or nodes[-1].session is None else self._known.get(nodes[-1].session)
        if owner is not None and nodes[-1].hash in owner.checkpoints:
            owner.checkpoints[nodes[-1].hash] = self._request_number

    def share(self, key: SessionKey | None, nodes: Iterable[Node]) -> None:
        """Record that a session, or a request without one, uses these blocks: what is another's is its
        family's, if it is the same, or else nobody's."""
        for node in nodes:
            if node.session is not None and node.session != key:
                top = self._top(node.session)
                node.session = top if key is not None and self._top(key) == top else None

    def note_computed(self, tenant: Tenant, key: SessionKey | None, node: Node, *, is_new: bool) -> None:
        """Record that a request has computed a block, which may have been known."""
        if is_new:
            node.session = key
        self.share(key, [node])
        if key is None or node.session != key:
            return
        session = self._open(tenant, key)
        self._note_end(session, node)
        if self._checkpoint_limit and RegionKind.CHECKPOINT in node.ram:
            session.checkpoints[node.hash] = self._request_number

    def has_surplus(self, node: Node) -> bool:
        """Whether the session of this block may have too many checkpoints."""
        session = None if node.session is None else self._known.get(node.session)
        return session is not None and 0 < self._checkpoint_limit < len(session.checkpoints)

    def take_surplus(self, newest: Node, *, resumed: Node | None) -> list[Node]:
        """Return the blocks whose checkpoints are more than the session of the newest one may have, and count
        them no more; but neither the newest nor the one that a request for the same prompt would resume from.

        Those go whose loss costs least: few tokens lie between the checkpoint before and them, and many
        requests came since their last use. Those that others have used or that are pinned count for nobody.
        """
        assert newest.session is not None
        session = self._known[newest.session]
        self._forget_lost(session, newest.session)
        surplus: list[Node] = []
        while len(session.checkpoints) > self._checkpoint_limit:
            counted = [node for name in session.checkpoints if (node := self._tree.get(name)) is not None]
            gaps = {node: self._gap(node, counted) for node in counted if node not in (newest, resumed)}
            ages = {n: self._request_number - session.checkpoints[n.hash] + 1 for n in gaps}
            if not gaps:
                break
            surplus.append(min(gaps, key=lambda node: gaps[node] / ages[node]))
            del session.checkpoints[surplus[-1].hash]
        self._stats.dropped_checkpoint_total += len(surplus)
        return surplus

    def _forget_lost(self, session: _Session, key: SessionKey) -> None:
        """Stop counting the checkpoints that are gone, or not only this session's."""
        for name in list(session.checkpoints):
            node = self._tree.get(name)
            is_own = node is not None and node.session == key and not node.is_pinned
            if node is None or not is_own or not node.has(RegionKind.CHECKPOINT, with_ssd=True):
                del session.checkpoints[name]

    def _gap(self, node: Node, counted: Sequence[Node]) -> int:
        """Return the tokens from the checkpoint before on the way to this one. `counted` tells of tails,
        which are no block's ancestors, and of what lies before a gap in a chain without kv."""
        below, size = node, self._tree.settings.block_token_count
        tails = [tail for tail in counted if tail.token_count < size]
        for above in chain((node,), self._tree.ancestors(node)):
            ends = (tail.end_token_index for tail in tails if _begins_like(tail, above))
            if tail_end := max(ends, default=0):
                return node.end_token_index - tail_end
            if above is not node and above.has(RegionKind.CHECKPOINT, with_ssd=True):
                return node.end_token_index - above.end_token_index
            below = above
        earlier = (n.end_token_index for n in counted if n.end_token_index <= below.start_token_index)
        return node.end_token_index - max(earlier, default=0)

    def end(self, key: SessionKey) -> list[Node]:
        """Make the blocks that only this session and its children have used the next to go, the ends of their
        chains before their beginnings; return them, beginnings first. All of them have ended then. Who uses
        a block later makes it the most recently used one."""
        session = self._known.get(key)
        if session is None:
            return []
        ending = {key: session} | {child: self._known[child] for child in session.children}
        nodes = [node for node in self._own(ending) if not node.is_pinned]
        nodes.sort(key=lambda node: node.start_token_index)
        for node in nodes:
            self._tree.demote(node)
        self._stats.ended_total += sum(not each.is_ended for each in ending.values())
        for each in ending.values():
            each.is_ended = True
        self._stats.released_block_total += len(nodes)
        return nodes

    def has_ended(self, node: Node) -> bool:
        """Whether only a session that has ended has used this block."""
        session = None if node.session is None else self._known.get(node.session)
        return session is not None and session.is_ended

    def snapshot(self) -> SessionStats:
        known = self._known.values()
        return dataclasses.replace(
            self._stats,
            session_count=len(known),
            child_count=sum(session.parent is not None for session in known),
            ended_count=sum(session.is_ended for session in known),
        )

    def _open(self, tenant: Tenant, key: SessionKey) -> _Session:
        """Return a session that is used now, known from now on; one that had ended goes on."""
        session = self._known.get(key)
        if session is None:
            session = self._known[key] = _Session(tenant)
            self._of.setdefault(tenant, OrderedDict())[key] = None
            if len(self._known) > self.session_limit:
                self._forget_one()
        session.is_ended = False
        self._of[tenant].move_to_end(key)
        return session

    def _join(self, tenant: Tenant, key: SessionKey, parent: SessionKey) -> None:
        """Have a session that is used now belong to the family of `parent`, which is used with it."""
        top = self._top(parent)
        session = self._known[key]
        if top == key or session.children:
            return  # it is the parent itself
        if session.parent is None:
            session.parent = top
        above = self._open(tenant, session.parent)
        if self._known.get(key) is session:  # one is remembered at least, and that is the parent then
            above.children[key] = None

    def _top(self, key: SessionKey) -> SessionKey:
        """Return the session whose family this one belongs to: its parent, or itself."""
        session = self._known.get(key)
        return key if session is None or session.parent is None else session.parent

    def _forget_one(self) -> None:
        tenant = max(self._of, key=lambda tenant: len(self._of[tenant]))
        key, _ = self._of[tenant].popitem(last=False)
        if not self._of[tenant]:
            del self._of[tenant]
        session = self._known.pop(key)
        for child in session.children:
            self._known[child].parent = None
        if session.parent is not None:
            self._known[session.parent].children.pop(key, None)
        self._stats.forgotten_total += 1

    def _note_end(self, session: _Session, node: Node) -> None:
        session.ends.pop(node.parent, None)
        session.ends[node.hash] = None
        if len(session.ends) > END_LIMIT:
            session.ends = {name: None for name in session.ends if self._tree.get(name) is not None}
            for name in list(session.ends)[:-END_LIMIT]:
                del session.ends[name]

    def _own(self, sessions: Mapping[SessionKey, _Session]) -> list[Node]:
        """Return the known blocks that only these sessions have used, as far as their ends lead to them."""
        own: dict[BlockHash, Node] = {}
        for name in chain.from_iterable(session.ends for session in sessions.values()):
            node = self._tree.get(name)
            while node is not None and node.session in sessions and node.hash not in own:
                own[node.hash] = node
                node = self._tree.get(node.parent)
        return list(own.values())


def _begins_like(tail: Node, node: Node) -> bool:
    """Whether a block begins with the tokens of a shorter one."""
    is_shorter = tail.parent == node.parent and tail.token_count < node.token_count
    known, wanted = tail.token_ids, node.token_ids
    return is_shorter and known is not None and wanted is not None and wanted[: len(known)] == known
