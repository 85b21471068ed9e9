"""Worker images: what a gateway has prepared of a prompt's images, out of the protocol's words.

Here is read what the message itself shows: how many there are, tensors as long as their shapes say, places
inside the prompt. The rest is for who knows the model (`vision/`). The gateway's hashes are not looked at:
an image is known by what its tensors have in them.
"""

from __future__ import annotations

import math
from typing import Final

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.config import ServerConfig
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import SentImages, SentTensor
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.validation import shown

FIELD: Final = "mm_inputs"
_PLACES: Final = f"{FIELD}.mm_placeholders"
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
"""As the protocol calls them -> as they are called here, and bytes of a number."""


def check_images(request: worker.GenerateRequest, *, info: ModelInfo, config: ServerConfig) -> None:
    """Refuse images by what the message shows at once, however long it is; raises InvalidRequest."""
    inputs = request.mm_inputs
    if not info.sees_images:
        raise InvalidRequest(
            Reason.IMAGES_UNSUPPORTED,
            f"{FIELD} has images; the model {info.model_id!r} ({info.architecture}) {info.image_refusal}",
            field=FIELD,
            metadata={"architecture": info.architecture},
        )
    if request.WhichOneof("input") != "tokenized":
        raise _invalid(FIELD, "is set without `tokenized`, whose tokens its images stand among")
    if inputs.modality not in (common_pb2.MODALITY_UNSPECIFIED, common_pb2.IMAGE):
        raise _invalid(f"{FIELD}.modality", f"is {inputs.modality}; images are served, and nothing else")
    if not inputs.HasField(_PIXELS):
        raise _invalid(f"{FIELD}.{_PIXELS}", "is missing; no KV comes from other workers, so images need it")
    count, limit = len(inputs.mm_placeholders), config.max_images
    if not 1 <= count <= limit:
        raise _invalid(_PLACES, f"has {count} images; there must be 1 to {limit}")
    if len(inputs.model_specific_tensors) > _TENSOR_COUNT_LIMIT:
        raise _invalid(
            f"{FIELD}.model_specific_tensors",
            f"has {len(inputs.model_specific_tensors)} tensors; at most {_TENSOR_COUNT_LIMIT} may be",
        )


def sent_images_of(request: worker.GenerateRequest) -> SentImages:
    """Return images that `check_images` let pass; raises InvalidRequest. Any thread: it takes time in
    proportion to their bytes."""
    inputs = request.mm_inputs
    if (key := inputs.encoder_input_key) not in ("", _PIXELS):
        raise _invalid(f"{FIELD}.encoder_input_key", f"is {shown(key)}; models served here take {_PIXELS}")
    places = _places_of(inputs, len(request.tokenized.input_ids))
    tensors = [_tensor_of(_PIXELS, inputs.pixel_values, f"{FIELD}.{_PIXELS}")]
    for name, tensor in inputs.model_specific_tensors.items():
        field = f"{FIELD}.model_specific_tensors[{shown(name)}]"
        if name == _PIXELS:
            raise _invalid(field, f"is there beside {FIELD}.{_PIXELS}")
        tensors.append(_tensor_of(name, tensor, field))
    return SentImages(
        tuple(tensors),
        places,
        places_field=_PLACES,
        token_id=inputs.im_token_id if inputs.HasField("im_token_id") else None,
        token_field=f"{FIELD}.im_token_id",
    )


def _places_of(inputs: worker.MultimodalInputs, token_count: int) -> tuple[range, ...]:
    places: list[range] = []
    end = 0
    for index, told in enumerate(inputs.mm_placeholders):
        stop = told.offset + told.length
        if not end <= told.offset < stop <= token_count:
            raise _invalid(
                f"{_PLACES}[{index}]",
                f"has the offset {told.offset} and the length {told.length}; images lie one behind the other "
                f"in the {token_count} tokens of the prompt, this one from {end} on",
            )
        places.append(range(told.offset, stop))
        end = stop
    return tuple(places)


def _tensor_of(name: str, tensor: worker.TensorData, field: str) -> SentTensor:
    if tensor.WhichOneof("payload") in ("shm", "remote"):
        raise _invalid(field, "is not in the message; let the gateway send tensors `inline`")
    if tensor.dtype not in _DTYPES:
        raise _invalid(field, f"is of the type {shown(tensor.dtype)}; known are {', '.join(_DTYPES)}")
    if not 1 <= len(tensor.shape) <= _DIMENSION_COUNT_LIMIT:
        raise _invalid(
            field, f"has {len(tensor.shape)} dimensions; there must be 1 to {_DIMENSION_COUNT_LIMIT}"
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
