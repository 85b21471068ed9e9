"""`icehouse tokenize`, `detokenize`, `embed`, `rerank`: texts, tokens, vectors and ranks."""

from __future__ import annotations

import json

from tests.fixtures.terminal import invoke
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_embedding_service import EMBEDDING, embedding
from tests.unit.rpc.services.test_rerank_service import TEXT, vowels


async def test_tokens_are_shown_as_ids_as_a_table_and_as_json(served: RunningServer) -> None:
    ask = ("tokenize", "Hi", "--address", served.server.address)
    told, ids, facts = await invoke(*ask), await invoke(*ask, "--ids"), await invoke(*ask, "--json")
    assert "<72>" in told.stdout and "2 tokens" in told.stdout
    assert ids.stdout == "72,105\n"
    assert json.loads(facts.stdout) == [{"id": 72, "piece": "<72>"}, {"id": 105, "piece": "<105>"}]
    tokens = await invoke("tokenize", "--tokens", "1", "--address", served.server.address)
    assert tokens.exit_code == 2 and "already tokens" in tokens.output


async def test_detokenize_gives_the_text_back(served: RunningServer) -> None:
    address = ("--address", served.server.address)
    told = await invoke("detokenize", "72,105", *address)
    piped = await invoke("detokenize", "-", "--json", *address, input="72 105\n")
    outside = await invoke("detokenize", "300", *address)
    assert (told.stdout, json.loads(piped.stdout)) == ("Hi\n", {"text": "Hi"})
    assert outside.exit_code == 1 and "token_ids[0] is 300" in outside.stderr


async def test_each_text_has_its_vector() -> None:
    async with running(info=EMBEDDING) as served:
        served.engine.script = embedding
        address = ("--address", served.server.address, "--no-normalize")
        lines = await invoke("embed", "ab", "abcdef", "--pooling", "mean", *address)
        facts = await invoke("embed", "-", "--json", *address, input="ab\nabcdef\n")
    assert [json.loads(line) for line in lines.stdout.splitlines()] == [[3, 4, 2, 1], [3, 4, 6, 1]]
    assert [(each["text"], each["vector"][2]) for each in json.loads(facts.stdout)] == [
        ("ab", 2),
        ("abcdef", 6),
    ]


async def test_texts_are_ranked_by_how_well_they_answer() -> None:
    async with running() as served:
        served.engine.script = vowels
        ask = ["--text", TEXT, "--positive-answer", "y", "--negative-answer", "n"]
        ask += ["--address", served.server.address]
        told = await invoke("rerank", "q", "xyz", "aeio", "--top-count", "1", *ask)
        facts = await invoke("rerank", "q", "-", "--json", *ask, input="xyz\naeio\n")
    assert told.stdout.split()[2:] == ["0.095", "aeio"]
    assert [(each["index"], each["text"]) for each in json.loads(facts.stdout)] == [(1, "aeio"), (0, "xyz")]
