"""A gateway's request in the API's words: each field is mapped, without effect, or refused by its name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fixtures.rpc.fake_engine import MODEL_INFO
from tests.fixtures.rpc.worker import HAS_PROTOCOL

if not HAS_PROTOCOL:
    pytest.skip("smg-grpc-proto, of the extra `fleet`, is missing", allow_module_level=True)

from icehouse.v1 import inference_service_pb2
from icehouse.v1 import inference_service_pb2 as native
from icehouse_server.config import ServerConfig
from icehouse_server.errors import InvalidRequest
from icehouse_server.rpc.worker.gateway_request import (
    REFUSED,
    LogprobsShown,
    WorkerRequest,
    worker_request_of,
)
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

CONFIG = ServerConfig()


def read(**fields: Any) -> WorkerRequest:
    return worker_request_of(messages.GenerateRequest(**fields), info=MODEL_INFO, config=CONFIG)


def sampled(**params: Any) -> WorkerRequest:
    return read(text="a", sampling_params=messages.SamplingParams(**params))


# Field -> what it is set to, and the part of the API's request that this makes.
MAPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {"sampling": {"temperature": 0.5}}),
    "top_p": (0.25, {"sampling": {"top_p": 0.25}}),
    "top_k": (7, {"sampling": {"top_k": 7}}),
    "min_p": (0.125, {"sampling": {"min_p": 0.125}}),
    "frequency_penalty": (1.5, {"sampling": {"frequency_penalty": 1.5}}),
    "presence_penalty": (-1.5, {"sampling": {"presence_penalty": -1.5}}),
    "repetition_penalty": (1.25, {"sampling": {"repetition_penalty": 1.25}}),
    "max_tokens": (9, {"max_output_tokens": 9}),
    "min_tokens": (3, {"sampling": {"min_output_tokens": 3}}),
    "stop": (["x", "y"], {"stop": ["x", "y"]}),
    "stop_token_ids": ([7, 9], {"stop_token_ids": [7, 9]}),
    "ignore_eos": (True, {"sampling": {"ignore_end_tokens": True}}),
    "n": (2, {"completions": 2}),
    "seed": (11, {"sampling": {"seed": 11}}),
    "logit_bias": ({5: 2.5}, {"sampling": {"logit_bias": {5: 2.5}}}),
    "logprobs": (3, {"logprobs": {"top_count": 3}}),
    "prompt_logprobs": (4, {"logprobs": {"top_count": 4, "prompt": True}}),
    "json_schema": ("{}", {"response_format": {"json_schema": "{}"}}),
    "regex": ("a+", {"response_format": {"regex": "a+"}}),
    "grammar": ("start: /a/", {"response_format": {"lark": "start: /a/"}}),
    "json_object": (True, {"response_format": {"json_object": {}}}),
    "choice": (
        messages.ChoiceConstraint(choices=["a", "b"]),
        {"response_format": {"choice": {"texts": ["a", "b"]}}},
    ),
}
BESIDE = {"skip_special_tokens"}
"""Mapped onto the engine's request, which the API has no field for."""

DEFAULT: dict[str, Any] = {
    "prompt": {"text": "a"},
    "max_output_tokens": MODEL_INFO.context_token_limit,
    "sampling": {"temperature": 1.0},
}


NO_EFFECT = (
    # The gateway makes the text.
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    # A constraint always begins with the first token.
    "grammar_from_first_token",
)


def expected(part: dict[str, Any]) -> native.GenerateRequest:
    sampling = {**DEFAULT["sampling"], **part.get("sampling", {})}
    return native.GenerateRequest(**{**DEFAULT, **part, "sampling": sampling})


def test_every_sampling_field_is_decided() -> None:
    known = (
        set(MAPPED)
        | BESIDE
        | set(NO_EFFECT)
        | {name.rpartition(".")[2] for name in REFUSED if "sampling" in name}
    )
    assert set(messages.SamplingParams.DESCRIPTOR.fields_by_name) == known


def test_every_field_of_the_request_is_decided() -> None:
    decided = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
    decided |= {"mm_inputs"} | {name for name in REFUSED if "." not in name}
    assert set(messages.GenerateRequest.DESCRIPTOR.fields_by_name) == decided
    assert set(messages.TokenizedInput.DESCRIPTOR.fields_by_name) == {"original_text", "input_ids"}


@pytest.mark.parametrize("field", MAPPED)
def test_a_field_reaches_the_field_of_the_api(field: str) -> None:
    value, part = MAPPED[field]
    assert sampled(**{field: value}).native == expected(part)


@pytest.mark.parametrize("field", NO_EFFECT)
def test_a_field_without_effect_changes_nothing(field: str) -> None:
    assert sampled(**{field: True}).native == expected({})


def test_what_is_unset_is_what_the_protocol_means_by_it() -> None:
    plain = read(text="a")
    assert plain.native == expected({})
    assert (plain.logprobs, plain.shows_markers) == (LogprobsShown(), True)
    assert sampled(seed=-1).native == expected({}), "any seed"
    assert sampled(seed=-2).native.sampling.seed == 2**64 - 2


def test_output_tokens_left_open_are_bounded_by_the_limit() -> None:
    request = messages.GenerateRequest(text="a")
    config = ServerConfig(max_output_tokens_limit=5)
    assert worker_request_of(request, info=MODEL_INFO, config=config).native.max_output_tokens == 5


def test_tokens_and_names_are_taken_over() -> None:
    tokenized = messages.TokenizedInput(original_text="ignored", input_ids=[1, 2, 299])
    request = read(request_id="chatcmpl_1", tokenized=tokenized, stream=True, data_parallel_rank=0).native
    assert (request.request_id, list(request.prompt.tokens.ids)) == ("chatcmpl_1", [1, 2, 299])


def test_markers_go_beside() -> None:
    assert not sampled(skip_special_tokens=True).shows_markers


def test_each_part_of_log_probabilities_keeps_its_own_count() -> None:
    request = sampled(logprobs=2, prompt_logprobs=0)
    assert request.logprobs == LogprobsShown(output_top_count=2, prompt_top_count=0)
    assert (request.native.logprobs.top_count, request.native.logprobs.prompt) == (2, True)


REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "kv_transfer_params": {"kv_transfer_params": {}},
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
    "extra_mm_inputs": {"extra_mm_inputs": [{}]},
    "media_refs": {"media_refs": {}},
    "data_parallel_rank": {"data_parallel_rank": 1},
    "tokenized.input_ids[1]": {"tokenized": {"input_ids": [1, 300]}},
    "tokenized.input_ids": {"tokenized": {"input_ids": [1] * 64}},
    "sampling_params.structural_tag": {"sampling_params": {"structural_tag": "{}"}},
    "sampling_params.truncate_prompt_tokens": {"sampling_params": {"truncate_prompt_tokens": 3}},
    "sampling_params.max_tokens": {"sampling_params": {"max_tokens": 0}},
    "sampling_params.n": {"sampling_params": {"n": 2**31}},
    "sampling_params.top_k": {"sampling_params": {"top_k": 2**31}},
    "sampling_params.min_tokens": {"sampling_params": {"min_tokens": 2**31}},
    "sampling_params.json_object": {"sampling_params": {"json_object": False}},
    "sampling_params.stop_token_ids[0]": {"sampling_params": {"stop_token_ids": [2**32 - 1]}},
    "sampling_params.stop_token_ids": {"sampling_params": {"stop_token_ids": [1] * 129}},
}


@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_what_cannot_be_done_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**REFUSED_VALUES[field])
    assert caught.value.field == field
    assert field in caught.value.message or "the prompt has" in caught.value.message


UNCOPIED: dict[str, dict[str, Any]] = {
    "sampling_params.stop": {"stop": ["x"] * 100_000},
    "sampling_params.stop_token_ids": {"stop_token_ids": [1] * 100_000},
    "sampling_params.logit_bias": {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    "sampling_params.choice.choices": {"choice": {"choices": ["x"] * 100_000}},
}


@pytest.mark.parametrize("field", UNCOPIED)
def test_what_is_too_many_is_refused_before_it_is_copied(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_message(**fields: Any) -> native.GenerateRequest:
        raise AssertionError(f"a message was made of {sorted(fields)}")

    monkeypatch.setattr(inference_service_pb2, "GenerateRequest", no_message)
    with pytest.raises(InvalidRequest, match=f"{re.escape(field)} is 100000 .*at most") as caught:
        sampled(**UNCOPIED[field])
    assert caught.value.field == field


def test_every_refused_field_has_its_example() -> None:
    assert set(REFUSED) <= set(REFUSED_VALUES)
