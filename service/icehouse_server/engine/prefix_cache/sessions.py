"""Sessions: which blocks one conversation alone has used, so that they are evicted first once it has ended.

Inference thread only, pure data, no mlx. A session's key is a hash of its tenant and its name; the name
itself is not kept. `Node.session` says which session computed a block, as long as nobody else has used it.
All other state is bounded; losing it only changes the order of eviction.

A session may have a parent: the agent that started it. An agent and all sessions that it started are a
family; blocks that several of a family have used belong to the parent. Families have two generations: a
session that names a child as its parent joins the child's parent. So there are no long chains or cycles.
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
"""Sessions remembered for all tenants together; the tenant with the most loses one first."""
END_LIMIT = 32
"""Chain ends remembered for a session, those of its forks included."""

_KEY_BYTES = 16
_HASH_KEY_LIMIT = 64
"""Longest key that BLAKE2b takes, in bytes."""


@dataclasses.dataclass(slots=True)
class _Session:
    """The state of one session. Its block names may be of blocks that are gone."""

    tenant: Tenant
    parent: SessionKey | None = None
    """A session that has no parent itself."""
    children: dict[SessionKey, None] = dataclasses.field(default_factory=dict)
    is_ended: bool = False
    ends: dict[BlockHash, None] = dataclasses.field(default_factory=dict)
    """The last blocks of its chains, in the order in which they were computed."""
    checkpoints: dict[BlockHash, int] = dataclasses.field(default_factory=dict)
    """Blocks whose checkpoints count towards its limit, each with the number of the last request that used
    it; empty without a limit."""


class Sessions:
    """The known sessions, bounded. A key includes the tenant, so no tenant can reach another's sessions."""

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
        """Return the key of a tenant's session; None for a request without one."""
        if not session_id:
            return None
        # A session's name has no zero byte, so no two pairs give the same string.
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
        """Record that a request resumes from the end of this chain, and its session's `parent`, if any."""
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
        """Record that a session, or a request without one, uses these blocks: those of another session then
        belong to the parent if both are of one family, otherwise to no session."""
        for node in nodes:
            if node.session is not None and node.session != key:
                top = self._top(node.session)
                node.session = top if key is not None and self._top(key) == top else None

    def note_computed(self, tenant: Tenant, key: SessionKey | None, node: Node, *, is_new: bool) -> None:
        """Record that a request has computed a block, which may have been known before."""
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
        """Whether the session of this block has too many checkpoints, lost ones counted."""
        session = None if node.session is None else self._known.get(node.session)
        return session is not None and 0 < self._checkpoint_limit < len(session.checkpoints)

    def take_surplus(self, newest: Node, *, resumed: Node | None) -> list[Node]:
        """Pick the blocks whose checkpoints exceed the limit of the session of `newest`, and stop counting
        them. Neither `newest` is picked nor `resumed`, from which the same prompt would resume.

        The cheapest losses are picked first: few tokens after the previous checkpoint, many requests since
        the last use. Pinned checkpoints and those that others have used do not count.
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
        """Stop counting checkpoints that are gone, pinned, or no longer this session's alone."""
        for name in list(session.checkpoints):
            node = self._tree.get(name)
            is_own = node is not None and node.session == key and not node.is_pinned
            if node is None or not is_own or not node.has(RegionKind.CHECKPOINT, with_ssd=True):
                del session.checkpoints[name]

    def _gap(self, node: Node, counted: Sequence[Node]) -> int:
        """Return the token count between the previous checkpoint and this one. `counted` adds tails, which
        are never ancestors, and blocks before a gap in a chain without kv."""
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
        """End a session and its children: the blocks that only they have used are evicted next, the ends of
        chains before their beginnings. Returns these blocks, beginnings first. A later use of a block makes
        it the most recently used one again."""
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
        """Return the session of this key as the most recently used one, new if not known, and not ended."""
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
        """Add an open session to the family of `parent`, which counts as used too."""
        top = self._top(parent)
        session = self._known[key]
        if top == key or session.children:
            return  # it is a parent itself
        if session.parent is None:
            session.parent = top
        above = self._open(tenant, session.parent)
        if self._known.get(key) is session:  # opening the parent may have pushed it out
            above.children[key] = None

    def _top(self, key: SessionKey) -> SessionKey:
        """Return the parent of this session's family: its own parent, or itself."""
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
        """Return the known blocks that only these sessions have used, found from their chain ends."""
        own: dict[BlockHash, Node] = {}
        for name in chain.from_iterable(session.ends for session in sessions.values()):
            node = self._tree.get(name)
            while node is not None and node.session in sessions and node.hash not in own:
                own[node.hash] = node
                node = self._tree.get(node.parent)
        return list(own.values())


def _begins_like(tail: Node, node: Node) -> bool:
    """Whether a block begins with the tokens of a shorter block, the tail."""
    is_shorter = tail.parent == node.parent and tail.token_count < node.token_count
    known, wanted = tail.token_ids, node.token_ids
    return is_shorter and known is not None and wanted is not None and wanted[: len(known)] == known
