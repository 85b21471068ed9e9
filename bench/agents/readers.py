"""Readers of the public trace formats: kv-cache-tester's sessions, Mooncake's requests, lmcache's texts.

kv-cache-tester (github.com/callanjfox/kv-cache-tester): a JSON file of one session; blocks of 64 tokens by
hash; sub-agents are nested. Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSONL without
sessions; blocks of 512 tokens. lmcache (github.com/LMCache/lmcache-agent-trace): JSONL with the text itself.
Files may be compressed with gzip.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.agents.trace import Request, StreamIndex, Trace

_MOONCAKE_BLOCK = 512
_TEXT_BLOCK = 64
_CHARACTERS_PER_TOKEN = 4
"""What English and code have, roughly; texts are cut into blocks without a tokenizer."""
_OWN_BLOCK_COUNT = 2
"""A prompt of fewer blocks tells no session: many prompts have the first block in common."""
_MICROSECONDS_FROM = 1e12
"""Times larger than this are microseconds since 1970; smaller ones are seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """How sessions that were recorded one by one are played together."""

    shared: float = 0.75
    """Share of each session's tools and instructions that all sessions have in common."""
    open_count: float = 8.0
    """Sessions that are open at once, on average."""
    seed: int = 1


def read_trace(paths: Sequence[Path], arrangement: Arrangement) -> Trace:
    """Read files of one format. Raises ValueError for a file of no known format."""
    files = sorted(file for path in paths for file in (path.rglob("*.json*") if path.is_dir() else [path]))
    if not files:
        raise ValueError(f"no trace below {', '.join(str(path) for path in paths)}: give files or folders")
    name = paths[0].name.partition(".")[0]
    if ".jsonl" not in files[0].name:
        return sessions_trace(name, map(_document, files), arrangement)
    lines = [line for file in files for line in _lines(file)]
    if lines and "hash_ids" in lines[0]:
        return mooncake_trace(name, lines)
    if lines and "input" in lines[0]:
        return text_trace(name, lines)
    raise ValueError(f"{files[0]} is no trace: a line has neither hash_ids nor input")


def sessions_trace(name: str, documents: Iterable[Mapping[str, Any]], arrangement: Arrangement) -> Trace:
    """Return kv-cache-tester's sessions, played together as `arrangement` says."""
    index = StreamIndex()
    requests: list[Request] = []
    durations: dict[int, float] = {}
    block, count = 64, 0
    for document in documents:
        block = document["block_size"]
        own = _Session(document, index, arrangement.shared)
        session_count, made = own.requests(first_session=count)
        durations[count] = max((request.time_s for request in made), default=0.0)
        count += session_count
        requests += made
    starts_s = _starts(durations, requests, arrangement)
    shifted = (dataclasses.replace(r, time_s=r.time_s + starts_s[r.session]) for r in requests)
    return Trace(name, block, tuple(sorted(shifted, key=lambda request: request.time_s)))


class _Session:
    """One file of kv-cache-tester's, with the sub-agents nested in it."""

    def __init__(self, document: Mapping[str, Any], index: StreamIndex, shared: float) -> None:
        self._document = document
        self._index = index
        self._head_token_count = document.get("tool_tokens", 0) + document.get("system_tokens", 0)
        is_local = document.get("hash_id_scope", "local") == "local"
        self._scope: Hashable = document.get("id") if is_local else None
        self._shared_block_count = (
            int(shared * self._head_token_count) // document["block_size"] if is_local else 0
        )

    def requests(self, *, first_session: int) -> tuple[int, list[Request]]:
        """Return how many sessions there are, the sub-agents' too, and all requests from time 0 on."""
        agents: list[tuple[int | None, Sequence[Mapping[str, Any]]]] = [(None, self._document["requests"])]
        made: list[Request] = []
        for number, (parent, entries) in enumerate(agents, first_session):
            plain = [entry for entry in entries if entry["type"] != "subagent"]
            agents += [(number, entry["requests"]) for entry in entries if entry["type"] == "subagent"]
            made += [
                self._request(entry, number, parent, is_last=entry is plain[-1], is_nested=parent is not None)
                for entry in plain
            ]
        return len(agents), made

    def _request(
        self, entry: Mapping[str, Any], session: int, parent: int | None, *, is_last: bool, is_nested: bool
    ) -> Request:
        shared = 0 if is_nested else self._shared_block_count
        ids: list[Hashable] = [("shared", place) for place in range(min(shared, len(entry["hash_ids"])))]
        ids += [(self._scope, block_id) for block_id in entry["hash_ids"][shared:]]
        return Request(
            session=session,
            parent=parent,
            time_s=entry["t"],
            prompt=self._index.spans(ids),
            token_count=entry["in"],
            output_token_count=entry["out"],
            head_token_count=0 if is_nested else self._head_token_count,
            is_last=is_last,
        )


def _starts(
    durations: Mapping[int, float], requests: Sequence[Request], arrangement: Arrangement
) -> dict[int, float]:
    """Return when each session begins; sub-agents begin with the session that they belong to."""
    source = random.Random(arrangement.seed)
    mean_s = sum(durations.values()) / max(1, len(durations)) / arrangement.open_count
    order = list(durations)
    source.shuffle(order)
    starts_s, time_s = {}, 0.0
    for session in order:
        starts_s[session] = time_s
        time_s += source.expovariate(1.0 / mean_s) if mean_s else 0.0
    for request in requests:
        if request.parent is not None and request.session not in starts_s:
            starts_s[request.session] = starts_s[request.parent]
    return starts_s


def mooncake_trace(name: str, lines: Iterable[Mapping[str, Any]]) -> Trace:
    """Return Mooncake's requests. Sessions are guessed: a prompt that goes on behind the last whole block of
    an earlier one belongs to its session."""
    index = StreamIndex()
    owners: dict[int, int] = {}
    """The session by the last whole block of its latest prompt."""
    requests: list[Request] = []
    session_count = 0
    for line in lines:
        # The last block is seldom whole, and its hash is of what it has.
        ids = line["hash_ids"][: line["input_length"] // _MOONCAKE_BLOCK]
        session = owners.get(index.deepest_known(ids))
        if session is None:
            session, session_count = session_count, session_count + 1
        spans = index.spans(ids)
        if len(ids) >= _OWN_BLOCK_COUNT:
            owners[index.deepest_known(ids)] = session
        requests.append(
            Request(
                session=session,
                parent=None,
                time_s=line["timestamp"] / 1000,
                prompt=spans,
                token_count=line["input_length"],
                output_token_count=line["output_length"],
                head_token_count=0,
                is_last=False,
            )
        )
    return Trace(name, _MOONCAKE_BLOCK, _with_ends(requests))


def text_trace(name: str, lines: Iterable[Mapping[str, Any]]) -> Trace:
    """Return lmcache's requests, their texts cut into blocks of 256 characters, which stand for 64 tokens."""
    index = StreamIndex()
    numbers: dict[str, int] = {}
    size = _TEXT_BLOCK * _CHARACTERS_PER_TOKEN
    requests = []
    for line in sorted(lines, key=lambda line: line["timestamp"]):
        text, stamp = line["input"], line["timestamp"]
        requests.append(
            Request(
                session=numbers.setdefault(line["session_id"], len(numbers)),
                parent=None,
                time_s=stamp / 1e6 if stamp > _MICROSECONDS_FROM else float(stamp),
                prompt=index.spans(text[at : at + size] for at in range(0, len(text) - size + 1, size)),
                token_count=max(1, len(text) // _CHARACTERS_PER_TOKEN),
                output_token_count=max(1, len(line["output"]) // _CHARACTERS_PER_TOKEN),
                head_token_count=0,
                is_last=False,
            )
        )
    began_s = requests[0].time_s if requests else 0.0
    return Trace(
        name,
        _TEXT_BLOCK,
        _with_ends([dataclasses.replace(each, time_s=each.time_s - began_s) for each in requests]),
    )


def _with_ends(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests in order of time, the last one of each session marked."""
    ordered = sorted(requests, key=lambda request: request.time_s)
    last = {request.session: place for place, request in enumerate(ordered)}
    return tuple(
        dataclasses.replace(request, is_last=last[request.session] == place)
        for place, request in enumerate(ordered)
    )


def _document(file: Path) -> dict[str, Any]:
    found = json.loads(_text(file))
    if "block_size" not in found or "requests" not in found:
        raise ValueError(f"{file} is no trace of a session: it has no block_size or no requests")
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in _text(file).splitlines() if line.strip())


def _text(file: Path) -> str:
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
