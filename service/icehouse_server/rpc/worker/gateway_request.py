"""Worker request: a gateway's GenerateRequest mapped to the API's own, so that the same checks see both.

Every field of the protocol is mapped, or has no effect here, or is refused by name; a test walks the
descriptors. Pure functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Final

from google.protobuf.message import Message
from icehouse.v1 import inference_service_pb2, response_format_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.config import ServerConfig
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import SentImages, SentTensor
from icehouse_server.domain.sampling import SEED_RANGE
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.field_checks import (
    STOP_TOKEN_COUNT_LIMIT,
    check_count,
    check_length,
    check_token_ids,
    refuse_value,
    shown,
)
from icehouse_server.rpc.messages.options import CHOICE_TEXT_LIMIT, LOGIT_BIAS_COUNT_LIMIT

REFUSED = {
    "kv_transfer_params": "it takes no KV from other workers",
    "kv_transfer_params_json": "it takes no KV from other workers",
    # Other modalities, such as videos.
    "extra_mm_inputs": "send all images in mm_inputs; other modalities are not supported",
    # Files that the worker would have to read, for prompts with one token for each image.
    "media_refs": "send images as tensors in mm_inputs, or as files in icehouse.v1 chats",
    "sampling_params.structural_tag": "constrain the output with json_schema, regex, grammar or choice",
    "sampling_params.truncate_prompt_tokens": "shorten the prompt at the gateway",
}
"""Fields that are not supported, and why; a request that sets one is refused."""

_UNSET_TEMPERATURE = 1.0
_ANY_SEED = -1


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsShown:
    """Which log probabilities a gateway asked for; the engine returns the larger count for both."""

    output_top_count: int | None = None
    """None for none."""
    prompt_top_count: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A gateway's request: the part that the API has fields for, and the rest."""

    native: inference_service_pb2.GenerateRequest
    logprobs: LogprobsShown
    shows_markers: bool
    """Whether stop strings may match special tokens."""
    read_images: Callable[[], SentImages] | None = None
    """Returns the prompt's images, off the event loop; None if it has none."""


def worker_request_of(
    request: worker.GenerateRequest, *, info: ModelInfo, config: ServerConfig
) -> WorkerRequest:
    """Return the request in the API's fields; raises InvalidRequest for errors in fields it does not have."""
    params = request.sampling_params
    _refuse(request, "")
    _refuse(params, "sampling_params.")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        refuse_value("data_parallel_rank", request.data_parallel_rank, "0: this worker has one rank")
    _check_counts(params, config)
    has_images = request.HasField("mm_inputs")
    if has_images:
        check_images(request, info=info, config=config)
    native = inference_service_pb2.GenerateRequest(
        request_id=request.request_id,
        max_output_tokens=_max_output_tokens(params, info, config),
        stop=params.stop,
        completions=_as_int32(params.n, "sampling_params.n"),
    )
    match request.WhichOneof("input"):
        case "tokenized":
            native.prompt.tokens.ids.extend(input_ids_of(request.tokenized, info))
        case "text":
            native.prompt.text = request.text
    _fill_sampling(native, params)
    check_token_ids(params.stop_token_ids, info, field="sampling_params.stop_token_ids")
    native.stop_token_ids.extend(params.stop_token_ids)
    _fill_format(native, params)
    return WorkerRequest(
        native,
        logprobs=_fill_logprobs(native, params),
        shows_markers=not params.skip_special_tokens,
        read_images=functools.partial(sent_images_of, request) if has_images else None,
    )


def input_ids_of(tokenized: worker.TokenizedInput, info: ModelInfo) -> Sequence[int]:
    """Return a prompt's tokens, checked for the API's message; raises InvalidRequest."""
    # The length is checked before the ids, so that the longest message costs the event loop little.
    check_length(len(tokenized.input_ids), info, field="tokenized.input_ids")
    ids: Sequence[int] = tokenized.input_ids
    check_token_ids(ids, info, field="tokenized.input_ids")
    return ids


def _refuse(message: Message, prefix: str) -> None:
    for descriptor, _ in message.ListFields():
        name = f"{prefix}{descriptor.name}"
        if name in REFUSED:
            raise InvalidRequest(
                Reason.UNSUPPORTED,
                f"{name} is set, which this worker does not support: {REFUSED[name]}",
                field=name,
                metadata={"field": name},
            )


def _check_counts(params: worker.SamplingParams, config: ServerConfig) -> None:
    """Refuse early what the API would refuse anyway: copying it into the API's message may take seconds."""
    for name, items, limit, unit in (
        ("stop", params.stop, config.max_stop_count, "strings"),
        ("stop_token_ids", params.stop_token_ids, STOP_TOKEN_COUNT_LIMIT, "tokens"),
        ("logit_bias", params.logit_bias, LOGIT_BIAS_COUNT_LIMIT, "entries"),
        ("choice.choices", params.choice.choices, CHOICE_TEXT_LIMIT, "texts"),
    ):
        check_count(f"sampling_params.{name}", len(items), limit, unit)


def _max_output_tokens(params: worker.SamplingParams, info: ModelInfo, config: ServerConfig) -> int:
    """Return the most tokens to generate; if absent, as many as context and limit allow."""
    if not params.HasField("max_tokens"):
        return min(config.max_output_tokens_limit, info.context_token_limit)
    count: int = params.max_tokens
    if count == 0:
        refuse_value("sampling_params.max_tokens", count, "1 or more, or absent")
    return min(count, config.max_output_tokens_limit)


def _fill_sampling(native: inference_service_pb2.GenerateRequest, params: worker.SamplingParams) -> None:
    sampling = native.sampling
    sampling.temperature = params.temperature if params.HasField("temperature") else _UNSET_TEMPERATURE
    sampling.top_p = params.top_p
    sampling.repetition_penalty = params.repetition_penalty
    sampling.top_k = _as_int32(params.top_k, "sampling_params.top_k")
    sampling.min_p = params.min_p
    sampling.frequency_penalty = params.frequency_penalty
    sampling.presence_penalty = params.presence_penalty
    sampling.min_output_tokens = _as_int32(params.min_tokens, "sampling_params.min_tokens")
    sampling.ignore_end_tokens = params.ignore_eos
    sampling.logit_bias.update(params.logit_bias)
    if params.HasField("seed") and params.seed != _ANY_SEED:
        sampling.seed = params.seed % SEED_RANGE


def _fill_format(native: inference_service_pb2.GenerateRequest, params: worker.SamplingParams) -> None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            native.response_format.json_schema = params.json_schema
        case "regex":
            native.response_format.regex = params.regex
        case "grammar":
            native.response_format.lark = params.grammar
        case "json_object":
            if not params.json_object:
                refuse_value("sampling_params.json_object", False, "true, or absent")
            native.response_format.json_object.SetInParent()
        case "choice":
            choice = response_format_pb2.ChoiceFormat(texts=params.choice.choices)
            native.response_format.choice.CopyFrom(choice)


def _fill_logprobs(
    native: inference_service_pb2.GenerateRequest, params: worker.SamplingParams
) -> LogprobsShown:
    of_output = params.logprobs if params.HasField("logprobs") else None
    of_prompt = params.prompt_logprobs if params.HasField("prompt_logprobs") else None
    counts = [count for count in (of_output, of_prompt) if count is not None]
    if counts:
        # A count out of range must reach the API's check.
        native.logprobs.top_count = min(counts) if min(counts) < 0 else max(counts)
        native.logprobs.prompt = of_prompt is not None
    return LogprobsShown(of_output, of_prompt)


def _as_int32(value: int, field: str) -> int:
    """Return an unsigned 32-bit count as the signed one of the API's messages."""
    if value >= 1 << 31:
        refuse_value(field, value, f"at most {(1 << 31) - 1}")
    return value


_FIELD: Final = "mm_inputs"
_PLACEHOLDERS: Final = f"{_FIELD}.mm_placeholders"
_PIXELS: Final = "pixel_values"
_TENSOR_COUNT_LIMIT: Final = 8
_DIMENSION_COUNT_LIMIT: Final = 8
_DTYPES: Final = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "uint32": ("U32", 4),
    "uint8": ("U8", 1),
}
"""From the protocol's names to ours, with the bytes of one number."""


def check_images(request: worker.GenerateRequest, *, info: ModelInfo, config: ServerConfig) -> None:
    """Refuse images by checks that take the same short time for any message; raises InvalidRequest."""
    inputs = request.mm_inputs
    if not info.sees_images:
        raise InvalidRequest(
            Reason.IMAGES_UNSUPPORTED,
            f"{_FIELD} has images; the model {info.model_id!r} ({info.architecture}) {info.image_refusal}",
            field=_FIELD,
            metadata={"architecture": info.architecture},
        )
    if request.WhichOneof("input") != "tokenized":
        raise _invalid(_FIELD, "is set without `tokenized`, which holds the images' tokens")
    if inputs.modality not in (common_pb2.MODALITY_UNSPECIFIED, common_pb2.IMAGE):
        raise _invalid(f"{_FIELD}.modality", f"is {inputs.modality}; only images are supported")
    if not inputs.HasField(_PIXELS):
        raise _invalid(
            f"{_FIELD}.{_PIXELS}", "is missing; no KV is taken from other workers, so images need it"
        )
    count, limit = len(inputs.mm_placeholders), config.max_images
    if not 1 <= count <= limit:
        raise _invalid(_PLACEHOLDERS, f"has {count} images; it must have 1 to {limit}")
    if len(inputs.model_specific_tensors) > _TENSOR_COUNT_LIMIT:
        raise _invalid(
            f"{_FIELD}.model_specific_tensors",
            f"has {len(inputs.model_specific_tensors)} tensors; the limit is {_TENSOR_COUNT_LIMIT}",
        )


def sent_images_of(request: worker.GenerateRequest) -> SentImages:
    """Return images that `check_images` let pass; raises InvalidRequest. Any thread.

    Takes time in proportion to their bytes. Only what the message itself shows is checked; `vision/` checks
    the rest. The gateway's hashes are not used: an image's identity is the content of its tensors.
    """
    inputs = request.mm_inputs
    if (key := inputs.encoder_input_key) not in ("", _PIXELS):
        raise _invalid(f"{_FIELD}.encoder_input_key", f"is {shown(key)}; models served here take {_PIXELS}")
    spans = _spans_of(inputs, len(request.tokenized.input_ids))
    tensors = [_tensor_of(_PIXELS, inputs.pixel_values, f"{_FIELD}.{_PIXELS}")]
    for name, tensor in inputs.model_specific_tensors.items():
        field = f"{_FIELD}.model_specific_tensors[{shown(name)}]"
        if name == _PIXELS:
            raise _invalid(field, f"is set beside {_FIELD}.{_PIXELS}")
        tensors.append(_tensor_of(name, tensor, field))
    return SentImages(
        tuple(tensors),
        spans,
        places_field=_PLACEHOLDERS,
        token_id=inputs.im_token_id if inputs.HasField("im_token_id") else None,
        token_field=f"{_FIELD}.im_token_id",
    )


def _spans_of(inputs: worker.MultimodalInputs, token_count: int) -> tuple[range, ...]:
    spans: list[range] = []
    end = 0
    for index, span in enumerate(inputs.mm_placeholders):
        stop = span.offset + span.length
        if not end <= span.offset < stop <= token_count:
            raise _invalid(
                f"{_PLACEHOLDERS}[{index}]",
                f"has the offset {span.offset} and the length {span.length}; images follow each other in "
                f"the prompt's {token_count} tokens, so this one must begin at {end} or later",
            )
        spans.append(range(span.offset, stop))
        end = stop
    return tuple(spans)


def _tensor_of(name: str, tensor: worker.TensorData, field: str) -> SentTensor:
    if tensor.WhichOneof("payload") in ("shm", "remote"):
        raise _invalid(field, "is not in the message; let the gateway send tensors `inline`")
    if tensor.dtype not in _DTYPES:
        raise _invalid(field, f"has the type {shown(tensor.dtype)}; supported are {', '.join(_DTYPES)}")
    if not 1 <= len(tensor.shape) <= _DIMENSION_COUNT_LIMIT:
        raise _invalid(
            field, f"has {len(tensor.shape)} dimensions; it must have 1 to {_DIMENSION_COUNT_LIMIT}"
        )
    dtype, number_bytes = _DTYPES[tensor.dtype]
    shape, data = tuple(tensor.shape), tensor.inline
    if math.prod(shape) * number_bytes != len(data):
        raise _invalid(
            field,
            f"has {len(data)} bytes; the shape {list(shape)} of {tensor.dtype} has "
            f"{math.prod(shape) * number_bytes}",
        )
    return SentTensor(HostTensor(name, dtype, shape, memoryview(data)), field)


def _invalid(field: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.IMAGE_INVALID, f"{field} {complaint}", field=field, metadata={"field": field}
    )
