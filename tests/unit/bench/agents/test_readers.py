"""The three trace formats, each from a small sample made by hand, and the spans that prompts become."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.agents.paths import paths_of
from bench.agents.readers import Arrangement, read_trace
from bench.agents.trace import Span, StreamIndex, Trace


def entry(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 64 * len(ids) + 10, "out": 7, "hash_ids": ids, **more}


def session(name: str, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    document = {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 200,
        "system_tokens": 56,
    }
    return {**document, "requests": requests, **more}


def sessions(folder: Path, *documents: dict[str, Any], shared: float = 0.5) -> Trace:
    for number, document in enumerate(documents):
        content = json.dumps(document).encode()
        (folder / f"trace_{number}.json.gz").write_bytes(gzip.compress(content))
    return read_trace([folder], Arrangement(shared=shared, open_count=1))


def lines(file: Path, *found: dict[str, Any]) -> Trace:
    file.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    return read_trace([file], Arrangement())


def test_a_prompt_that_grows_is_one_stream_and_one_that_parts_begins_another() -> None:
    index = StreamIndex()
    assert index.spans([1, 2, 3]) == (Span(0, 3),)
    assert index.spans([1, 2, 3, 4]) == (Span(0, 4),)
    assert index.spans([1, 2, 9, 3]) == (Span(0, 2), Span(1, 2))
    assert index.spans([1, 2, 9, 3, 5, 6]) == (Span(0, 2), Span(1, 4))
    assert index.spans([1, 2, 3, 4, 5]) == (Span(0, 5),)
    assert index.spans([9]) == (Span(2, 1),), "an id counts with those before it"
    assert index.spans([]) == ()


def test_local_ids_are_a_sessions_own_but_for_the_shared_share_of_the_head(tmp_path: Path) -> None:
    # Of 256 tokens of tools and instructions half are shared: two blocks.
    trace = sessions(
        tmp_path,
        session("a", [entry(0, [1, 2, 3, 4, 5]), entry(9, [1, 2, 3, 4, 5, 6])]),
        session("b", [entry(0, [1, 2, 3, 4, 5])]),
    )
    assert (trace.block_token_count, trace.session_count, len(trace.requests)) == (64, 2, 3)
    assert paths_of(trace).block_count == 2 + 4 + 3
    by_session: dict[int, list[Any]] = {}
    for each in trace.requests:
        by_session.setdefault(each.session, []).append(each)
    first, second = by_session[0]
    assert second.time_s - first.time_s == 9
    assert (first.token_count, first.output_token_count, first.head_token_count) == (330, 7, 256)
    assert [each.is_last for each in (first, second, *by_session[1])] == [False, True, True]


def test_global_ids_are_the_same_in_all_sessions(tmp_path: Path) -> None:
    documents = (session(name, [entry(0, [1, 2, 3])], hash_id_scope="global") for name in "ab")
    assert paths_of(sessions(tmp_path, *documents)).block_count == 3


def test_nested_agents_are_sessions_of_their_own_with_a_parent(tmp_path: Path) -> None:
    nested = {
        "t": 2,
        "type": "subagent",
        "agent_id": "x",
        "requests": [entry(2, [7, 8]), entry(5, [7, 8, 9])],
    }
    trace = sessions(tmp_path, session("a", [entry(0, [1]), nested, entry(8, [1, 2])]))
    assert [(each.session, each.parent, each.time_s) for each in trace.requests] == [
        (0, None, 0),
        (1, 0, 2),
        (1, 0, 5),
        (0, None, 8),
    ]
    assert [each.is_last for each in trace.requests] == [False, False, True, True]
    assert [each.head_token_count for each in trace.requests] == [256, 0, 0, 256]


def test_sessions_begin_one_after_the_other_by_the_seed(tmp_path: Path) -> None:
    documents = [session(str(n), [entry(0, [1]), entry(100, [1, 2])]) for n in range(20)]
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.json").write_text(json.dumps(document), encoding="utf-8")
    found = [read_trace([tmp_path], Arrangement(open_count=4, seed=seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    times = [each.time_s for each in found[0].requests]
    assert times == sorted(times) and times[0] == 0.0
    assert 100 + 100 < times[-1] < 20 * 100, "twenty sessions of 100 s, about four at once"


def test_mooncakes_sessions_are_prompts_that_go_on_with_another(tmp_path: Path) -> None:
    def line(at: int, length: int, ids: list[int]) -> dict[str, Any]:
        return {"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": ids}

    trace = lines(
        tmp_path / "chat.jsonl",
        line(0, 1200, [0, 1, 2]),
        line(1500, 1100, [0, 5, 6]),
        line(3000, 1700, [0, 1, 7, 8]),
        line(4000, 600, [0, 9]),
        line(5000, 600, [0, 10]),
    )
    assert [each.session for each in trace.requests] == [0, 1, 0, 2, 3]
    assert [each.is_last for each in trace.requests] == [False, True, True, True, True]
    assert [each.time_s for each in trace.requests] == [0.0, 1.5, 3.0, 4.0, 5.0]
    # The last block of each is not whole and does not count.
    assert [sum(span.block_count for span in each.prompt) for each in trace.requests] == [2, 2, 3, 1, 1]
    assert paths_of(trace).block_count == 4 and trace.block_token_count == 512


def test_texts_are_cut_into_blocks_from_their_beginning(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) * 32 for number in range(40))
    began = 1_760_000_000_000_000

    def line(at: int, content: str, name: str) -> dict[str, Any]:
        return {"timestamp": began + at, "input": content, "output": "ab" * 10, "session_id": name}

    trace = lines(
        tmp_path / "text.jsonl",
        line(2_500_000, text[:1000], "b"),
        line(0, text[:600], "a"),
        line(1_000_000, text[:900], "a"),
    )
    assert [each.time_s for each in trace.requests] == [0.0, 1.0, 2.5]
    assert [each.session for each in trace.requests] == [0, 0, 1]
    assert [each.prompt for each in trace.requests] == [(Span(0, 2),), (Span(0, 3),), (Span(0, 3),)]
    assert [each.token_count for each in trace.requests] == [150, 225, 250]
    assert [each.output_token_count for each in trace.requests] == [5, 5, 5]


@pytest.mark.parametrize("content", [{"requests": []}, {"block_size": 64}])
def test_another_file_is_refused_by_name(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "other.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json is no trace"):
        read_trace([tmp_path], Arrangement())


def test_lines_of_another_kind_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trace below"):
        read_trace([tmp_path], Arrangement())
    with pytest.raises(ValueError, match="neither hash_ids nor input"):
        lines(tmp_path / "log.jsonl", {"message": "hello"})
