"""What Generate answers is added up as it goes over the wire: nothing waits as a message of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import logprobs_pb2, tool_pb2, usage_pb2
from icehouse_server.rpc.services.inference_service import ReplySum


def entries(count: int, *, salt: int = 0) -> list[logprobs_pb2.TokenLogprobs]:
    """Return log probabilities of so many tokens, twenty others beside each."""
    top = [logprobs_pb2.TopLogprob(token_id=n, logprob=-0.5 * n, piece=f"<{n}>") for n in range(20)]
    return [
        logprobs_pb2.TokenLogprobs(token_id=salt + n, logprob=-n, rank=n, piece="x", top=top)
        for n in range(count)
    ]


def added(*, completion_count: int) -> ReplySum:
    """Return a sum of a prompt of 600 tokens in two pieces and 3 tokens of output each."""
    total = ReplySum(completion_count=completion_count)
    told = entries(600)
    total.add([inference.StreamResponse(started=inference.Started(request_id="r", seed=7))])
    for piece in (told[:512], told[512:]):
        progress = inference.PrefillProgress(prompt_logprobs=piece)
        total.add([inference.StreamResponse(prefill_progress=progress)])
    for index in range(completion_count):
        for entry in entries(3, salt=1000 * index):
            delta = inference.Delta(text="x", token_ids=[9], logprobs=[entry], completion_index=index)
            total.add([inference.StreamResponse(delta=delta)])
        finished = inference.Finished(
            finish_reason=usage_pb2.FINISH_REASON_LENGTH, completion_index=index, stop_string="END"
        )
        total.add([inference.StreamResponse(finished=finished)])
    return total


def test_an_answer_with_everything_is_what_was_told() -> None:
    reports = [usage_pb2.CacheReport(ram_tokens=n) for n in range(3)]
    encoded = added(completion_count=3).response(reports, lists_completions=True)
    answer = inference.GenerateResponse.FromString(encoded.data)
    assert list(answer.prompt_logprobs) == entries(600)
    assert (answer.request_id, answer.text, answer.cache, answer.seed) == ("r", "xxx", reports[0], 7)
    assert answer.stop_string == "END" and list(answer.token_ids) == [9, 9, 9]
    assert [(c.index, c.seed, c.cache) for c in answer.completions] == list(
        zip(range(3), range(7, 10), reports, strict=True)
    )
    for index, completion in enumerate(answer.completions):
        assert list(completion.logprobs) == entries(3, salt=1000 * index)
    assert answer.logprobs == answer.completions[0].logprobs


def test_one_output_is_not_listed_unless_it_was_asked_for() -> None:
    encoded = added(completion_count=1).response([usage_pb2.CacheReport()], lists_completions=False)
    answer = inference.GenerateResponse.FromString(encoded.data)
    assert list(answer.logprobs) == entries(3) and not answer.completions


def test_a_call_is_put_together_of_its_pieces() -> None:
    total = ReplySum(completion_count=1)
    for piece in (
        tool_pb2.ToolCallDelta(index=0, id="a", name="f"),
        tool_pb2.ToolCallDelta(index=0, arguments_json="{"),
        tool_pb2.ToolCallDelta(index=0, arguments_json="}"),
        tool_pb2.ToolCallDelta(index=0, repaired=True),
        tool_pb2.ToolCallDelta(index=1, id="b", name="g"),
        tool_pb2.ToolCallDelta(index=1, withdrawn=True),
    ):
        total.add([inference.StreamResponse(delta=inference.Delta(tool_call=piece))])
    encoded = total.response([usage_pb2.CacheReport()], lists_completions=False)
    [call] = inference.GenerateResponse.FromString(encoded.data).tool_calls
    assert call == tool_pb2.ToolCall(id="a", name="f", arguments_json="{}", repaired=True)


def test_log_probabilities_wait_as_bytes() -> None:
    total = added(completion_count=2)
    kept = list(reachable(total))
    assert not any(isinstance(item, logprobs_pb2.TokenLogprobs | logprobs_pb2.TopLogprob) for item in kept)


def reachable(start: object) -> Iterator[object]:
    """Yield what an object keeps alive, types and modules aside."""
    seen, left = {id(start)}, [start]
    while left:
        item = left.pop()
        yield item
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, type) and not hasattr(other, "__globals__"):
                seen.add(id(other))
                left.append(other)
