"""How tokens are drawn, from options to the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

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
    """Return the options as a message; those left out stay unset."""
    return sampling_pb2.SamplingParams(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        seed=options.get("seed"),
        xtc_probability=options.get("xtc_probability"),
        xtc_threshold=options.get("xtc_threshold"),
        repetition_penalty=options.get("repetition_penalty"),
        repetition_window=options.get("repetition_window", 0),
        presence_penalty=options.get("presence_penalty", 0.0),
        presence_window=options.get("presence_window", 0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        frequency_window=options.get("frequency_window", 0),
        logit_bias=options.get("logit_bias"),
        bad_words=options.get("bad_words", ()),
        bad_token_sequences=[
            sampling_pb2.TokenSequence(ids=token_ids) for token_ids in options.get("bad_token_sequences", ())
        ],
        min_output_tokens=options.get("min_output_tokens", 0),
        ignore_end_tokens=options.get("ignore_end_tokens", False),
    )
