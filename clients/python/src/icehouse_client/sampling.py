"""How tokens are drawn, from options to the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from icehouse.v1 import sampling_pb2


class SamplingOptions(TypedDict, total=False):
    """As `SamplingParams` of the API has them. Left out: the server's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    repetition_window: int
    presence_penalty: float
    presence_window: int
    frequency_penalty: float
    frequency_window: int
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_token_sequences: Sequence[Sequence[int]]
    min_output_tokens: int
    ignore_end_tokens: bool


def sampling_proto(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Return the options, named as the message's fields, as a message; those left out stay unset.

    Other keys are passed over: an option of a request is not one of its sampling.
    """
    fields: dict[str, Any] = {k: v for k, v in options.items() if k in SamplingOptions.__annotations__}
    sequences = fields.pop("bad_token_sequences", ())
    return sampling_pb2.SamplingParams(
        **fields, bad_token_sequences=[sampling_pb2.TokenSequence(ids=token_ids) for token_ids in sequences]
    )
