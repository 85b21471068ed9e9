"""Each scenario of clients/scenarios.json with the Python client."""

from __future__ import annotations

import base64
import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from icehouse_client import (
    Client,
    Conversation,
    IcehouseClientError,
    Image,
    Infill,
    Reply,
    Security,
    Tool,
    formats,
)

from clients.python.tests.scenario import Scenario

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def limits(scenario: Scenario) -> dict[str, Any]:
    return {"max_output_tokens": scenario.input["max_output_tokens"]}


def test_unary(scenario: Scenario, client: Client) -> None:
    reply = client.generate(scenario.text, **limits(scenario))
    assert reply.usage.output_tokens == len(reply.token_ids) == scenario.expect["output_tokens"]
    assert reply.finish_reason == scenario.expect["finish_reason"]
    assert reply.model == scenario.servers["model"]


def test_stream(scenario: Scenario, client: Client) -> None:
    whole = client.generate(scenario.text, **limits(scenario))
    stream = client.stream(scenario.text, **limits(scenario))
    assert "".join(stream) == whole.text == stream.reply.text
    assert stream.reply.token_ids == whole.token_ids
    assert stream.reply.usage.output_tokens == scenario.expect["output_tokens"]
    assert stream.reply.finish_reason == scenario.expect["finish_reason"]


def test_cancel(scenario: Scenario, client: Client) -> None:
    for _ in client.stream(scenario.text, request_id=scenario.own_name, **limits(scenario)):
        break
    while scenario.own_name in running(client):
        pass


def test_deadline(scenario: Scenario, client: Client) -> None:
    timeout_s = scenario.input["timeout_ms"] / 1000
    with pytest.raises(IcehouseClientError) as caught:
        list(client.stream(scenario.text, timeout_s=timeout_s, **limits(scenario)))
    assert caught.value.code.name == scenario.expect["code"]


def test_cancelled_by_id(scenario: Scenario, client: Client) -> None:
    stream = client.stream(scenario.text, request_id=scenario.own_name, **limits(scenario))
    pieces = iter(stream)
    next(pieces)
    assert scenario.own_name in running(client)
    assert client.cancel(scenario.own_name).method == scenario.expect["method"]
    with pytest.raises(IcehouseClientError) as caught:
        list(pieces)
    assert_refused(caught.value, scenario)


def test_invalid_argument(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as unary:
        client.generate(scenario.text, **limits(scenario))
    with pytest.raises(IcehouseClientError) as streamed:
        list(client.stream(scenario.text, **limits(scenario)))
    for refused in (unary.value, streamed.value):
        assert_refused(refused, scenario)
        assert refused.field == scenario.expect["field"] and refused.retry_after_s is None


def test_not_found(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        client.generate(scenario.text, model=scenario.input["model"])
    assert_refused(caught.value, scenario)
    assert caught.value.metadata[scenario.expect["metadata_key"]] == scenario.servers["model"]


def test_already_exists(scenario: Scenario, client: Client) -> None:
    with client.stream(scenario.text, request_id=scenario.own_name, **limits(scenario)) as stream:
        # Kept: an iteration that nobody holds any more ends the call.
        pieces = iter(stream)
        next(pieces)
        with pytest.raises(IcehouseClientError) as caught:
            client.generate(scenario.text, request_id=scenario.own_name)
    assert_refused(caught.value, scenario)


def test_id_of_two_tenants(scenario: Scenario, client: Client) -> None:
    name = scenario.own_name
    with client.stream(scenario.text, request_id=name, tenant=f"{name}-1", **limits(scenario)) as stream:
        # Kept: an iteration that nobody holds any more ends the call.
        pieces = iter(stream)
        next(pieces)
        count = scenario.input["other_max_output_tokens"]
        other = client.generate(scenario.text, request_id=name, tenant=f"{name}-2", max_output_tokens=count)
    assert (other.request_id, other.usage.output_tokens) == (name, scenario.expect["output_tokens"])


def test_unauthenticated(scenario: Scenario) -> None:
    for token, reason in (
        ("", scenario.expect["missing_reason"]),
        (scenario.input["unknown_token"], scenario.expect["unknown_reason"]),
    ):
        with secured(scenario, token) as client, pytest.raises(IcehouseClientError) as caught:
            client.generate(scenario.text, **limits(scenario))
        assert (caught.value.code.name, caught.value.reason) == (scenario.expect["code"], reason)


def test_permission_denied(scenario: Scenario) -> None:
    with (
        secured(scenario, scenario.servers["token"]) as client,
        pytest.raises(IcehouseClientError) as caught,
    ):
        client.generate(scenario.text, tenant=scenario.input["tenant"], **limits(scenario))
    assert_refused(caught.value, scenario)


def test_resource_exhausted(scenario: Scenario, client: Client) -> None:
    count = scenario.servers["tokens_per_minute"]
    client.generate(scenario.text, max_output_tokens=count, tenant=scenario.own_name)
    with pytest.raises(IcehouseClientError) as caught:
        client.generate(scenario.text, max_output_tokens=count, tenant=scenario.own_name)
    assert_refused(caught.value, scenario)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= scenario.expect["retry_after_limit_s"]


def test_unavailable(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        list(client.stream(scenario.text, **limits(scenario)))
    assert_refused(caught.value, scenario)


def test_retry_on_drain(scenario: Scenario, client: Client) -> None:
    reply = client.generate(scenario.text, **limits(scenario))
    assert reply.usage.output_tokens == scenario.expect["output_tokens"]
    with pytest.raises(IcehouseClientError) as caught:
        list(client.stream(scenario.text, **limits(scenario)))
    assert_refused(caught.value, scenario)


def test_retry_limit(scenario: Scenario) -> None:
    retry_limit = scenario.input["retry_limit"]
    asked: dict[str, Any] = {"request_id": scenario.own_name, **limits(scenario)}
    with Client(scenario.address, retry_limit=retry_limit) as client:
        reply = client.generate(scenario.text, **asked)
        assert reply.usage.output_tokens == scenario.expect["output_tokens"]
        with pytest.raises(IcehouseClientError) as caught:
            list(client.stream(scenario.text, **asked))
        assert_refused(caught.value, scenario)
        assert caught.value.retry_after_s is not None
    asked["request_id"] += "-again"
    with Client(scenario.address, retry_limit=retry_limit - 1) as client:
        with pytest.raises(IcehouseClientError) as caught:
            client.generate(scenario.text, **asked)
        assert_refused(caught.value, scenario)


def test_tools_loop(scenario: Scenario, client: Client) -> None:
    tool = Tool(**scenario.input["tool"])
    talk = Conversation(session_id=scenario.own_name)
    talk.say(scenario.input["question"])
    options: dict[str, Any] = {"tools": [tool], "tenant": scenario.own_name}
    reply = client.chat(talk, **options)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments) == (tool.name, scenario.expect["arguments"])
    assert (reply.text, reply.reasoning) == (scenario.expect["text"], scenario.expect["reasoning"])
    assert reply.finish_reason == scenario.expect["finish_reason"]
    stream = client.stream(talk, **options)
    assert "".join(stream) == reply.text and stream.reply.reasoning == reply.reasoning
    assert [(same.name, same.arguments) for same in stream.reply.tool_calls] == [(call.name, call.arguments)]
    talk.add(reply)
    talk.answer(call, scenario.input["result"])
    following = client.chat(talk, tool_choice="none", max_output_tokens=1, **options)
    known = reply.usage.prompt_tokens + reply.usage.output_tokens
    assert following.usage.prompt_tokens > known
    assert following.usage.cached_tokens > known - scenario.expect["uncached_known_tokens_limit"]


def test_reasoning_budget(scenario: Scenario, client: Client) -> None:
    talk = Conversation()
    talk.say(scenario.input["question"])
    reply = client.chat(talk, **limits(scenario))
    assert (reply.text, reply.reasoning) == (scenario.expect["text"], scenario.expect["reasoning"])
    assert reply.usage.reasoning_tokens == scenario.expect["reasoning_tokens"]
    limit = scenario.input["max_reasoning_tokens"]
    closed = client.chat(talk, max_reasoning_tokens=limit, **limits(scenario))
    assert closed.text.startswith(scenario.expect["text"]) and not closed.reasoning
    assert closed.usage.reasoning_tokens == scenario.expect["closed_reasoning_tokens"]


def test_infill(scenario: Scenario, client: Client) -> None:
    gap = Infill(scenario.input["prefix"], scenario.input["suffix"])
    reply = client.generate(gap, **limits(scenario))
    assert (reply.text, reply.finish_reason) == (scenario.expect["text"], scenario.expect["finish_reason"])
    assert reply.stop_token_id == reply.token_ids[-1]
    assert len(client.tokenize(gap)) == reply.usage.prompt_tokens


def shown(scenario: Scenario, image: str = "image") -> Conversation:
    talk = Conversation()
    data = base64.b64decode(scenario.input[image])
    talk.say(scenario.input["question"], images=[Image(data, scenario.input["media_type"])])
    return talk


def test_images(scenario: Scenario, client: Client) -> None:
    options: dict[str, Any] = {"tenant": scenario.own_name, **limits(scenario)}
    first = client.chat(shown(scenario), **options)
    again = client.chat(shown(scenario), **options)
    other = client.chat(shown(scenario, "other_image"), **options)
    assert first.usage.cached_tokens == scenario.expect["first_cached_tokens"]
    for reply in (first, again, other):
        assert reply.usage.image_tokens == scenario.expect["image_tokens"]
    missing = again.usage.prompt_tokens - again.usage.ram_tokens
    assert again.token_ids == first.token_ids and missing <= scenario.expect["uncached_tokens_limit"]
    assert other.usage.cached_tokens < scenario.expect["other_cached_tokens_limit"]


def test_broken_image(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        client.chat(shown(scenario), **limits(scenario))
    assert_refused(caught.value, scenario)
    assert caught.value.field == scenario.expect["field"]


def test_images_unsupported(scenario: Scenario, client: Client) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        client.chat(shown(scenario), **limits(scenario))
    assert_refused(caught.value, scenario)
    assert caught.value.field == scenario.expect["field"]
    assert scenario.expect["message_part"] in caught.value.message
    assert caught.value.metadata[scenario.expect["metadata_key"]] in caught.value.message


def test_structured_output(scenario: Scenario, client: Client) -> None:
    form = formats.json_schema(scenario.input["schema"], compact=True)
    reply = client.generate(scenario.text, response_format=form, **limits(scenario))
    assert reply.text == scenario.expect["text"]
    assert reply.json() == {key: scenario.expect[key] for key in ("city", "inhabitants")}
    found = client.generate_json(scenario.text, City, response_format=form, **limits(scenario))
    assert found == reply.decode(City) == City(**reply.json())


@dataclasses.dataclass(frozen=True, slots=True)
class City:
    city: str
    inhabitants: int


def test_unicode(scenario: Scenario, client: Client) -> None:
    form = formats.choice(scenario.input["choice"])
    assert (
        client.generate(scenario.text, response_format=form, **limits(scenario)).text
        == scenario.expect["text"]
    )
    pieces = list(client.stream(scenario.text, response_format=form, **limits(scenario)))
    assert "".join(pieces) == scenario.expect["text"]
    assert len(pieces) > 1 and not any(REPLACEMENT in piece for piece in pieces)
    ids = [token.id for token in client.tokenize(scenario.text)]
    assert client.detokenize(ids) == scenario.expect["text"]


def test_hundred_streams(scenario: Scenario, client: Client) -> None:
    def read(_: int) -> Reply:
        stream = client.stream(scenario.text, **limits(scenario))
        assert "".join(stream) == stream.reply.text
        return stream.reply

    count = scenario.input["stream_count"]
    whole = client.generate(scenario.text, **limits(scenario))
    with ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(read, range(count)))
    assert [reply.text for reply in replies] == [whole.text] * count
    assert {reply.usage.output_tokens for reply in replies} == {scenario.expect["output_tokens"]}


def test_cache_report(scenario: Scenario, client: Client) -> None:
    options: dict[str, Any] = {"tenant": scenario.own_name, **limits(scenario)}
    first = client.generate(scenario.text, **options)
    assert first.usage.cached_tokens == scenario.expect["first_cached_tokens"]
    stream = client.stream(scenario.text, **options)
    next(iter(stream))
    assert stream.started is not None
    missing = stream.started.prompt_tokens - stream.started.cached_tokens
    assert 0 < missing <= scenario.expect["uncached_tokens_limit"]
    second = client.generate(scenario.text, **options).usage
    assert second.ram_tokens == second.cached_tokens == stream.started.cached_tokens


def test_warm(scenario: Scenario, client: Client) -> None:
    progress: list[tuple[int, int]] = []
    answer = client.cache.warm(
        scenario.text,
        tenant=scenario.own_name,
        on_progress=lambda told: progress.append((told.processed_tokens, told.prompt_tokens)),
    )
    assert answer.usage.output_tokens == scenario.expect["output_tokens"]
    assert progress == sorted(progress)
    processed, whole = progress[-1]
    assert whole == answer.usage.prompt_tokens
    assert 0 <= whole - processed <= scenario.expect["unprocessed_tokens_limit"]


def test_explain(scenario: Scenario, client: Client) -> None:
    tenant = scenario.own_name
    unknown = client.cache.explain(scenario.text, tenant=tenant)
    assert unknown.cache.cached_tokens == scenario.expect["first_cached_tokens"]
    client.cache.warm(scenario.text, tenant=tenant)
    known = client.cache.explain(scenario.text, tenant=tenant)
    assert known.prompt_tokens - known.cache.ram_tokens <= scenario.expect["uncached_tokens_limit"]
    assert sum(block.token_count for block in known.blocks) == known.cache.ram_tokens


def test_pin(scenario: Scenario, client: Client) -> None:
    tenant = scenario.own_name
    client.cache.warm(scenario.text, tenant=tenant)
    pinned = client.cache.pin(scenario.text, tenant=tenant, ttl_s=scenario.input["ttl_s"])
    blocks = client.cache.explain(scenario.text, tenant=tenant).blocks
    assert pinned.block_count == len(blocks) > 0 and all(block.pinned for block in blocks)
    assert pinned.token_count == sum(block.token_count for block in blocks)


def test_unpin(scenario: Scenario, client: Client) -> None:
    tenant = scenario.own_name
    client.cache.warm(scenario.text, tenant=tenant)
    pinned = client.cache.pin(scenario.text, tenant=tenant)
    unpinned = client.cache.unpin(scenario.text, tenant=tenant)
    assert unpinned.block_count == pinned.block_count > 0
    assert not any(block.pinned for block in client.cache.explain(scenario.text, tenant=tenant).blocks)


def test_evict(scenario: Scenario, client: Client) -> None:
    tenant = scenario.own_name
    client.cache.warm(scenario.text, tenant=tenant)
    assert client.cache.evict(scenario.text, tenant=tenant).ram_block_count > 0
    left = client.cache.explain(scenario.text, tenant=tenant)
    assert left.cache.cached_tokens == scenario.expect["cached_tokens"]


def test_verify(scenario: Scenario, client: Client) -> None:
    counts: list[int] = []
    answer = client.cache.verify(on_progress=lambda told: counts.append(told.verified_block_count))
    assert answer.damaged_block_count == scenario.expect["damaged_block_count"]
    assert counts == sorted(counts) and counts[-1] == answer.verified_block_count


def test_watch_stats(scenario: Scenario, client: Client) -> None:
    count = scenario.input["answer_count"]
    answers = client.watch_stats(interval_s=scenario.input["interval_ms"] / 1000)
    times = [stats.collect_time.ToNanoseconds() for stats in itertools.islice(answers, count)]
    assert len(set(times)) == count and times == sorted(times)


def test_embed(scenario: Scenario, client: Client) -> None:
    vectors = client.embed(scenario.input["texts"], dimensions=scenario.input["dimensions"])
    assert len(vectors) == scenario.expect["vector_count"] and vectors.prompt_tokens > 0
    assert {len(vector) for vector in vectors} == {scenario.expect["vector_size"]}


def test_rerank(scenario: Scenario, client: Client) -> None:
    ranking = client.rerank(
        scenario.input["query"],
        scenario.input["documents"],
        text=scenario.input["template"],
        positive_answer=scenario.input["positive_answer"],
        negative_answer=scenario.input["negative_answer"],
    )
    assert sorted(ranked.index for ranked in ranking) == scenario.expect["indexes"]
    assert [ranked.score for ranked in ranking] == sorted((r.score for r in ranking), reverse=True)
    assert ranking.prompt_tokens > 0


def test_get_server(scenario: Scenario, client: Client) -> None:
    server = client.server()
    assert server.version and server.limits.max_output_tokens > 0
    state, feature = (
        f"SERVER_STATE_{scenario.expect['state']}",
        f"SERVER_FEATURE_{scenario.expect['feature']}",
    )
    enums = server.DESCRIPTOR.file.enum_types_by_name
    assert server.state == enums["ServerState"].values_by_name[state].number
    assert enums["ServerFeature"].values_by_name[feature].number in server.features


def test_token_refresh(scenario: Scenario) -> None:
    unknown, known = scenario.input["unknown_token"], scenario.servers["token"]
    count = scenario.expect["source_call_count"]
    with secured(scenario, source := Source(unknown, known)) as client:
        for _ in range(2):
            reply = client.generate(scenario.text, **limits(scenario))
            assert (reply.usage.output_tokens, source.count) == (scenario.expect["output_tokens"], count)
    with secured(scenario, source := Source(unknown, known)) as client:
        stream = client.stream(scenario.text, **limits(scenario))
        list(stream)
        assert (len(stream.reply.token_ids), source.count) == (scenario.expect["output_tokens"], count)
    with secured(scenario, source := Source(unknown)) as client:
        with pytest.raises(IcehouseClientError) as caught:
            client.generate(scenario.text, **limits(scenario))
        assert_refused(caught.value, scenario)
        assert source.count == count


class Source:
    """Gives one token after another, the last one for ever."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return self._tokens[min(self.count, len(self._tokens)) - 1]


def test_call_metadata(scenario: Scenario) -> None:
    with secured(scenario, "") as client:
        own = client.with_metadata({"authorization": f"Bearer {scenario.servers['token']}"})
        reply = own.generate(scenario.text, **limits(scenario))
        assert reply.usage.output_tokens == scenario.expect["output_tokens"]
        list(own.stream(scenario.text, **limits(scenario)))
        with pytest.raises(IcehouseClientError) as caught:
            client.generate(scenario.text, **limits(scenario))
        assert_refused(caught.value, scenario)


def test_tls_and_token(scenario: Scenario) -> None:
    token = scenario.servers["token"]
    with secured(scenario, token) as client:
        reply = client.generate(scenario.text, **limits(scenario))
    assert reply.usage.output_tokens == scenario.expect["output_tokens"]
    with (
        Client(scenario.address, security=Security(is_tls=True, token=token)) as untrusting,
        pytest.raises(IcehouseClientError) as caught,
    ):
        list(untrusting.stream(scenario.text, **limits(scenario)))
    assert caught.value.code.name == scenario.expect["untrusted_code"]


def running(client: Client) -> set[str]:
    return {request.request_id for request in client.requests()}


def secured(scenario: Scenario, token: str | Callable[[], str]) -> Client:
    authority = Path(scenario.servers["ca_path"]).read_bytes()
    return Client(scenario.address, security=Security(token=token, ca_pem=authority))


def assert_refused(error: IcehouseClientError, scenario: Scenario) -> None:
    assert (error.code.name, error.reason) == (scenario.expect["code"], scenario.expect["reason"])
