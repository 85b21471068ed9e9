"""Status page: what a browser gets over HTTP, and its JSON report, at most one a second however many look.

Called on the threads of the metrics endpoint. Nothing is computed or stored while nobody views the page. The
report has counters that operators have elsewhere too, and no part of a prompt, except how shared prefixes
begin if the rules have a decoder. Callers sent that text or a model generated it, so it may be anything: it
is made printable, without line breaks or characters that change the direction of text around it. It is not
markup: whoever shows it must escape it.

`*_count` and `*_bytes` are current, `*_total` since start, times in seconds; unknown values are null.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import hashlib
import heapq
import importlib.resources
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import TokenKeys, image_runs
from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.cache_stats import CacheStats, DiskStats, TenantShare, TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.domain.stats import EngineStats, ServerStatus, SlowRequest, StatsSnapshot
from icehouse_server.telemetry.metric import HistogramSeries

PAGE_PATH = "/"
REPORT_PATH = "/status.json"

_REPORT_INTERVAL_S = 1.0
_WAITING_LIMIT = 16
"""Most requests that wait for a report together; more get 503."""


class StatusPage:
    """Answers for two paths of the metrics endpoint.

    `read` asks the server, and returns None if it does not answer in time.
    """

    def __init__(
        self,
        *,
        read: Callable[[], ServerStatus | None],
        first_token: Callable[[], Iterable[HistogramSeries]],
        rules: ReportRules,
        clock: Clock,
    ) -> None:
        self._read = read
        self._first_token = first_token
        self._rules = rules
        self._clock = clock
        self._page = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._policy = content_security_policy(self._page)
        self._waiting_slots = threading.BoundedSemaphore(_WAITING_LIMIT)
        self._lock = threading.Lock()
        self._report: bytes | None = None
        """None if the server did not answer."""
        self._due_time = clock.monotonic()

    @property
    def pages(self) -> Mapping[str, WSGIApplication]:
        return dict.fromkeys((PAGE_PATH, REPORT_PATH), self._answer)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return _send(start_response, "405 Method Not Allowed")
        if environ["PATH_INFO"] == PAGE_PATH:
            headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": self._policy}
            return _send(start_response, "200 OK", self._page.encode(), headers)
        report = self._latest_report()
        if report is None:
            return _send(start_response, "503 Service Unavailable", headers={"Retry-After": "1"})
        return _send(start_response, "200 OK", report, {"Content-Type": "application/json"})

    def _latest_report(self) -> bytes | None:
        """Return a report of the last second; None if the server does not answer, or too many wait."""
        if not self._waiting_slots.acquire(blocking=False):
            return None
        try:
            with self._lock:
                if self._clock.monotonic() >= self._due_time:
                    self._report = self._new_report()
                    self._due_time = self._clock.monotonic() + _REPORT_INTERVAL_S
                return self._report
        finally:
            self._waiting_slots.release()

    def _new_report(self) -> bytes | None:
        status = self._read()
        if status is None:
            return None
        report = report_of(status, self._first_token(), rules=self._rules)
        return json.dumps(report, allow_nan=False, separators=(",", ":")).encode()


def content_security_policy(page: str) -> str:
    """Return a policy that allows the page's own script and style, and nothing else."""
    script, style = (_source_hash(page, element) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _source_hash(page: str, element: str) -> str:
    content = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    assert content, f"the page has no <{element}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _send(
    start_response: StartResponse, status: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Iterable[bytes]:
    always = {
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    start_response(status, [*always.items(), *(headers or {}).items()])
    return [body]


TENANT_LIMIT = 20
"""Most tenants shown: those with the most prompt and output tokens."""

_NAME_BYTES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class ReportRules:
    """What may be shown to anybody who reaches the port, and how blocks are named there."""

    version: str
    shows_request_ids: bool
    """False if callers authenticate: an id is then its tenant's secret."""
    name_key: bytes = dataclasses.field(repr=False)
    """Key of the hash that names blocks: a block's own hash would confirm a guess of its tokens."""
    decode: Decode | None = None
    """Turns tokens into text; None if no text is shown."""


def report_of(
    status: ServerStatus, first_token: Iterable[HistogramSeries], *, rules: ReportRules
) -> dict[str, Any]:
    """Return the report, ready for `json.dumps`."""
    snapshot = status.snapshot
    engine, cache, model = snapshot.engine, snapshot.cache, snapshot.model
    blocks = status.recent_blocks
    prefixes = None if blocks is None else [_prefix(n, rules) for n in shared_prefixes(blocks)]
    about = None if model is None else {"id": model.model_id, "device": model.device, "dtype": model.dtype}
    return {
        "version": rules.version,
        "collect_time": status.collect_time,
        "state": snapshot.state.name.lower(),
        "heartbeat_age_s": snapshot.heartbeat_age_s,
        "model": about,
        "engine": None if engine is None else _engine(engine, snapshot),
        "cache": None if cache is None else _cache(cache),
        "first_token": [_first_token(series) for series in first_token],
        "prefixes": prefixes,
        "shows_text": rules.decode is not None,
        "slowest_requests": [_slow(r, shows_id=rules.shows_request_ids) for r in status.slowest_requests],
        "models": _models(snapshot),
        "ranks": _ranks(snapshot),
        "tenants": _tenants(snapshot),
        "tenant_count": len(snapshot.tenants),
    }


def _engine(engine: EngineStats, snapshot: StatsSnapshot) -> dict[str, Any]:
    return {
        **_fields(engine, "uptime_s", "waiting_count", "loading_count", "prefilling_count", "decoding_count"),
        **_fields(engine, "decoding_limit", "finished_total", "failed_total", "memory_limit_bytes"),
        "output_tokens_per_s": snapshot.rates.output_tokens_per_s,
        "memory_bytes": engine.active_memory_bytes,
    }


def _cache(cache: CacheStats) -> dict[str, Any]:
    reused = ("ram_token_total", "ssd_token_total", "miss_token_total")
    return {
        "unsupported_detail": cache.unsupported_detail,
        "ram": _tier(cache.ram),
        "ssd": None if cache.ssd is None else _tier(cache.ssd),
        **_fields(cache.lookups, "lookup_total", "hit_total", *reused),
        "sessions": _fields(cache.sessions, "session_count", "ended_count", "ended_total"),
        "spilled_byte_total": cache.spill.persisted_byte_total,
        "read_byte_total": cache.promote.read_byte_total,
        "damaged_block_total": cache.integrity.damaged_block_total,
        **_fields(cache.disk or DiskStats(), "block_bytes", "raw_block_bytes"),
    }


def _tier(tier: TierStats) -> dict[str, Any]:
    blocks = ("block_count", "pinned_block_count", "token_count", "evicted_block_total")
    return _fields(tier, "size_bytes", "limit_bytes", *blocks)


def _fields(stats: object, *names: str) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in names}


def _first_token(series: HistogramSeries) -> dict[str, Any]:
    return {
        "reuse": series.labels[0],
        "count": series.cumulative_counts[-1],
        "p50_s": series.quantile(0.5),
        "p90_s": series.quantile(0.9),
        "bounds_s": series.bounds,
        "counts": series.counts,
    }


def _prefix(node: PrefixNode, rules: ReportRules) -> dict[str, Any]:
    first, last = node.blocks[0], node.blocks[-1]
    return {
        # The last block's hash identifies all blocks before it.
        "name": hashlib.blake2b(last.hash, key=rules.name_key, digest_size=_NAME_BYTES).hexdigest(),
        **_text(node, rules.decode),
        "start_token_index": first.start_token_index,
        "end_token_index": last.end_token_index,
        "block_count": len(node.blocks),
        "ram_block_count": sum(block.is_in_ram for block in node.blocks),
        "ssd_block_count": sum(block.is_on_ssd for block in node.blocks),
        # How many prompts reused its first block.
        "hit_count": first.hit_count,
        # Tokens that were not computed again thanks to these blocks.
        "reused_token_total": sum(map(_saved_tokens, node.blocks)),
        "branch_count": node.branch_count,
        "children": [_prefix(child, rules) for child in node.children],
    }


def _text(node: PrefixNode, decode: Decode | None) -> dict[str, str | None]:
    """Return how the node's own text begins, None if its tokens are not known."""
    if decode is None:
        return {}
    head = node.head
    is_whole = head is not None and len(head) == sum(block.token_count for block in node.blocks)
    return {"text": None if head is None else excerpt(head, decode, is_whole=is_whole)}


def _slow(request: SlowRequest, *, shows_id: bool) -> dict[str, Any]:
    shown = dataclasses.asdict(request)
    return shown if shows_id else {**shown, "request_id": ""}


def _models(snapshot: StatsSnapshot) -> list[dict[str, Any]]:
    """Return the loaded models; nothing if there can only be one."""
    return [
        {
            "id": name,
            "state": each.state.name.lower(),
            **_fields(each.engine or EngineStats(), "decoding_count", "waiting_count", "output_token_total"),
            "ram_bytes": 0 if each.cache is None else each.cache.ram.size_bytes,
        }
        for name, each in (snapshot.models or {}).items()
    ]


def _ranks(snapshot: StatsSnapshot) -> list[dict[str, Any]]:
    """Return the machines of a group, nothing if one serves alone. Visitors do not learn their names."""
    return [
        {
            "state": rank.state.name.lower(),
            **_fields(rank, "rank", "behind_order_count", "active_memory_bytes", "memory_limit_bytes"),
            "has_ssd_trouble": bool(rank.ssd_trouble),
            "ssd": None if rank.ssd is None else dataclasses.asdict(rank.ssd),
        }
        for rank in (() if snapshot.group is None else snapshot.group.ranks)
    ]


def _tenants(snapshot: StatsSnapshot) -> list[dict[str, Any]]:
    shares = {share.tenant: share for share in (snapshot.cache.tenants if snapshot.cache is not None else ())}
    greatest = heapq.nlargest(
        TENANT_LIMIT, snapshot.tenants, key=lambda use: use.prompt_token_total + use.output_token_total
    )
    return [
        {**dataclasses.asdict(use), "ram_bytes": share.ram_bytes, "ssd_bytes": share.ssd_bytes}
        for use in greatest
        for share in (shares.get(use.tenant, TenantShare(use.tenant)),)
    ]


Decode = Callable[[Sequence[int]], str]

CHARACTER_LIMIT = 80
HEAD_TOKEN_LIMIT = 128
"""Tokens that are looked at: enough for that many characters, unless each one takes several tokens."""

_CUT = "…"
_IMAGE = "[image]"
_REPLACEMENT = "\ufffd"
_CUT_LIMIT = 3
"""Most tokens at either end that may hold a part of a character, which has at most four bytes."""
_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need and that are invisible by themselves."""


def excerpt(keys: TokenKeys, decode: Decode, *, is_whole: bool) -> str:
    """Return how the text of these tokens begins; `is_whole` if no other tokens follow."""
    line = _line(" ".join(_pieces(keys[:HEAD_TOKEN_LIMIT], decode)))
    is_whole = is_whole and len(keys) <= HEAD_TOKEN_LIMIT and len(line) <= CHARACTER_LIMIT
    return line[:CHARACTER_LIMIT] + ("" if is_whole else _CUT)


def _pieces(keys: TokenKeys, decode: Decode) -> Iterator[str]:
    """Yield the texts between images, and a word for each image: its tokens have no text of their own."""
    reached = 0
    for run in image_runs(keys):
        yield _whole_characters(keys[reached : run.start], decode)
        yield _IMAGE
        reached = run.start + run.token_count
    yield _whole_characters(keys[reached:], decode)


def _whole_characters(token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text without the remains of characters that were cut at either end.

    If one byte is missing, a decoder may give up on the whole run. So the tokens of a cut character are
    removed before decoding.
    """
    cuts = sorted(itertools.product(range(_CUT_LIMIT + 1), repeat=2), key=sum)
    for before, behind in cuts:
        text = decode(token_ids[before : max(before, len(token_ids) - behind)])
        if not (text.startswith(_REPLACEMENT) or text.endswith(_REPLACEMENT)):
            return text
    return decode(token_ids).strip(_REPLACEMENT)


def _line(text: str) -> str:
    """Return the text on one line; characters that control terminal, line or direction become U+FFFD."""
    return "".join(
        character if character.isprintable() or character in _JOINERS else _REPLACEMENT
        for character in " ".join(text.split())
    )


NODE_LIMIT = 16
BRANCH_LIMIT = 4
"""Most nodes shown below one."""
DEPTH_LIMIT = 6


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixNode:
    """A chain of blocks that are reused together."""

    blocks: Sequence[RecentBlock]
    branch_count: int
    """Known continuations after it, including those that were never reused."""
    children: tuple[PrefixNode, ...]

    @property
    def head(self) -> TokenKeys | None:
        """Its first tokens, at most `HEAD_TOKEN_LIMIT`; None if those of its first block are not known."""
        if self.blocks[0].token_keys is None:
            return None
        known = itertools.takewhile(lambda keys: keys is not None, (b.token_keys for b in self.blocks))
        tokens = itertools.chain.from_iterable(keys or () for keys in known)
        return tuple(itertools.islice(tokens, HEAD_TOKEN_LIMIT))


def shared_prefixes(blocks: Iterable[RecentBlock]) -> tuple[PrefixNode, ...]:
    """Return the trees of reused blocks that saved the most tokens, the greatest first."""
    return _Forest(blocks).nodes()


class _Forest:
    """The blocks by parent, and the tokens that each saved together with all its descendants.

    Blocks that follow one another and are reused together are one node, as in a radix tree.
    """

    def __init__(self, blocks: Iterable[RecentBlock]) -> None:
        known = {block.hash: block for block in blocks}
        self._roots = [block for block in known.values() if block.parent not in known]
        self._children: dict[BlockHash, list[RecentBlock]] = collections.defaultdict(list)
        self._saved: collections.Counter[BlockHash] = collections.Counter()
        # Later blocks come first, so a block's sum is complete when it is added to its parent's.
        for block in sorted(known.values(), key=lambda block: -block.start_token_index):
            self._children[block.parent].append(block)
            self._saved[block.hash] += _saved_tokens(block)
            self._saved[block.parent] += self._saved[block.hash]

    def nodes(self) -> tuple[PrefixNode, ...]:
        """Choose the nodes best first, so that no tree displaces a larger one's branches."""
        chosen: dict[BlockHash, list[RecentBlock]] = {}
        waiting = [(-self._saved[top.hash], 0, top.hash, top) for top in self._shared(self._roots)]
        heapq.heapify(waiting)
        while waiting and len(chosen) < NODE_LIMIT:
            _, depth, _, first = heapq.heappop(waiting)
            chosen[first.hash] = run = self._run(first)
            if depth + 1 < DEPTH_LIMIT:
                for child in self._shared(self._children[run[-1].hash])[:BRANCH_LIMIT]:
                    heapq.heappush(waiting, (-self._saved[child.hash], depth + 1, child.hash, child))
        return tuple(self._built(self._roots, chosen))

    def _shared(self, blocks: Iterable[RecentBlock]) -> list[RecentBlock]:
        """Return the reused blocks; the one that saved most, with its descendants, comes first."""
        reused = [block for block in blocks if block.hit_count]
        return sorted(reused, key=lambda block: (-self._saved[block.hash], block.hash))

    def _run(self, first: RecentBlock) -> list[RecentBlock]:
        """Return a block and those after it, as long as half of its prompts continue with the same block."""
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
            yield PrefixNode(run, len(behind), tuple(self._built(behind, chosen)))


def _saved_tokens(block: RecentBlock) -> int:
    return block.token_count * block.hit_count
