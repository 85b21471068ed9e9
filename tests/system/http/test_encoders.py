"""Encoders over HTTP: /v1/embeddings and /v1/rerank as OpenAI's and Cohere's clients call them."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.fixtures.models.encoders import tiny_encoder_dir
from tests.fixtures.patience import BOUND_S
from tests.system.http.served import CHAT, ServedFront, body


def test_vectors_come_over_http_and_chats_are_told_where_to_go(tmp_path: Path) -> None:
    model = tiny_encoder_dir(tmp_path, "xlm-roberta", pooling="cls", prompts={"query": "find: "})
    front = ServedFront(model, tmp_path)
    with front.server as server, httpx2.Client(base_url=front.url, timeout=BOUND_S) as http:
        server.wait_until_serving()
        asked = {"model": "any", "input": ["find: ice", "ice"]}
        spelled, plain = http.post("/v1/embeddings", json=asked).json()["data"]
        named = http.post("/v1/embeddings", json={**asked, "input": "ice", "prompt_name": "query"}).json()
        chat = http.post(CHAT, json=body())
    assert named["data"][0]["embedding"] == pytest.approx(spelled["embedding"], abs=1e-6)
    assert named["data"][0]["embedding"] != pytest.approx(plain["embedding"], abs=0.01)
    assert chat.status_code == 400 and "/v1/embeddings" in chat.json()["error"]["message"]


def test_a_head_ranks_over_http(tmp_path: Path) -> None:
    front = ServedFront(tiny_encoder_dir(tmp_path, "bert", scores=True), tmp_path)
    documents = ["Straw.", "Tea.", "Ice lasts under straw."]
    with front.server as server, httpx2.Client(base_url=front.url, timeout=BOUND_S) as http:
        server.wait_until_serving()
        asked = {"model": "any", "query": "What keeps ice?", "documents": documents, "top_n": 2}
        found = http.post("/v1/rerank", json=asked).json()["results"]
    scores = [each["relevance_score"] for each in found]
    assert len(found) == 2 and scores == sorted(scores, reverse=True) and 0 < scores[-1] < scores[0] < 1
