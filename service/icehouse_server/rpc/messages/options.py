"""Options of a request: sampling, speculation and response format, as domain data. Pure functions.

Every error names its field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icehouse.v1 import response_format_pb2, sampling_pb2, speculation_pb2

from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import Drafting, Speculation
from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
)
from icehouse_server.domain.sampling import DEFAULT_XTC_THRESHOLD, SamplingParams
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.field_checks import (
    check_count,
    check_text_bytes,
    check_token_ids,
    refuse_value,
)

if TYPE_CHECKING:
    from icehouse_server.text.tokenizer import Tokenizer

LOGIT_BIAS_COUNT_LIMIT = 1024
LOGIT_BIAS_LIMIT = 100.0
BAD_WORD_COUNT_LIMIT = 128
BAD_WORD_BYTE_LIMIT = 256
BAD_WORD_TOKEN_LIMIT = 32
REPETITION_PENALTY_LIMIT = 10.0
PENALTY_LIMIT = 2.0


def sampling_of(
    proto: sampling_pb2.SamplingParams,
    *,
    stop_token_ids: tuple[int, ...] = (),
    generated_seed: int,
    max_output_tokens: int,
    info: ModelInfo,
) -> SamplingParams:
    """Return the sampling parameters, with the API's defaults. `bad_words` need the tokenizer: see
    `spellings`."""
    _check_numbers(proto)
    if not 0 <= proto.min_output_tokens <= max_output_tokens:
        refuse_value(
            "sampling.min_output_tokens",
            proto.min_output_tokens,
            f"0 to the {max_output_tokens} of max_output_tokens",
        )
    return SamplingParams(
        temperature=proto.temperature,
        top_p=proto.top_p or 1.0,
        top_k=proto.top_k,
        min_p=proto.min_p,
        xtc_probability=proto.xtc_probability,
        xtc_threshold=proto.xtc_threshold if proto.HasField("xtc_threshold") else DEFAULT_XTC_THRESHOLD,
        repetition_penalty=proto.repetition_penalty or 1.0,
        repetition_window=proto.repetition_window,
        presence_penalty=proto.presence_penalty,
        presence_window=proto.presence_window,
        frequency_penalty=proto.frequency_penalty,
        frequency_window=proto.frequency_window,
        logit_bias=_logit_bias_of(proto, info),
        banned=_banned_of(proto, info),
        min_output_token_count=proto.min_output_tokens,
        ignores_end_tokens=proto.ignore_end_tokens,
        stop_token_ids=stop_token_ids,
        seed=proto.seed if proto.HasField("seed") else generated_seed,
    )


def bad_words_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that the output must not contain; refuses too many, empty or long ones."""
    check_count("sampling.bad_words", len(words), BAD_WORD_COUNT_LIMIT, "texts")
    check_text_bytes("sampling.bad_words", words, BAD_WORD_BYTE_LIMIT)
    return tuple(words)


def spellings(
    words: Sequence[str], tokenizer: Tokenizer, *, vocabulary_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens, with and without a space before it, if the model can generate them. Raises
    InvalidRequest for a word of too many tokens."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        forms = (word,) if word.startswith(" ") else (word, f" {word}")
        for form in forms:
            token_ids = tuple(tokenizer.spell(form))
            if len(token_ids) > BAD_WORD_TOKEN_LIMIT:
                wanted = f"at most {BAD_WORD_TOKEN_LIMIT} tokens long"
                refuse_value(f"sampling.bad_words[{index}]", len(token_ids), wanted, unit="tokens")
            if token_ids and max(token_ids) < vocabulary_size:
                found[token_ids] = None
    return tuple(found)


def _check_numbers(proto: sampling_pb2.SamplingParams) -> None:
    penalty = f"{-PENALTY_LIMIT:g} to {PENALTY_LIMIT:g}"
    repetition = f"> 0 and <= {REPETITION_PENALTY_LIMIT:g}, or absent; 1 changes nothing"
    temperature, window = "a finite number >= 0; 0 is greedy", ">= 0; 0 counts all tokens"
    # NaN fails every comparison, so each condition states what is allowed.
    for name, is_allowed, wanted in (
        ("temperature", 0 <= proto.temperature < math.inf, temperature),
        ("top_p", 0 <= proto.top_p <= 1, "> 0 and <= 1, or absent; 1 keeps all tokens"),
        ("top_k", proto.top_k >= 0, ">= 0; 0 keeps all tokens"),
        ("min_p", 0 <= proto.min_p < 1, ">= 0 and < 1; 0 keeps all tokens"),
        ("xtc_probability", 0 <= proto.xtc_probability <= 1, "0 to 1; 0 leaves nothing out"),
        ("xtc_threshold", 0 <= proto.xtc_threshold <= 0.5, "0 to 0.5"),
        ("repetition_penalty", 0 <= proto.repetition_penalty <= REPETITION_PENALTY_LIMIT, repetition),
        ("presence_penalty", -PENALTY_LIMIT <= proto.presence_penalty <= PENALTY_LIMIT, penalty),
        ("frequency_penalty", -PENALTY_LIMIT <= proto.frequency_penalty <= PENALTY_LIMIT, penalty),
        ("repetition_window", proto.repetition_window >= 0, window),
        ("presence_window", proto.presence_window >= 0, window),
        ("frequency_window", proto.frequency_window >= 0, window),
    ):
        if not is_allowed:
            refuse_value(f"sampling.{name}", getattr(proto, name), wanted)


def _logit_bias_of(proto: sampling_pb2.SamplingParams, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    check_count("sampling.logit_bias", len(proto.logit_bias), LOGIT_BIAS_COUNT_LIMIT, "entries")
    biases, size = tuple(sorted(proto.logit_bias.items())), info.vocabulary_size
    for token_id, bias in biases:
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < size:
            raise InvalidRequest(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{field} names a token outside the vocabulary; ids of this model are 0 to {size - 1}",
                field=field,
                metadata={"token_id": token_id, "vocabulary_size": size},
            )
        if not -LOGIT_BIAS_LIMIT <= bias <= LOGIT_BIAS_LIMIT:
            refuse_value(field, bias, f"{-LOGIT_BIAS_LIMIT:g} to {LOGIT_BIAS_LIMIT:g}")
    return biases


def _banned_of(proto: sampling_pb2.SamplingParams, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    sequences = proto.bad_token_sequences
    check_count("sampling.bad_token_sequences", len(sequences), BAD_WORD_COUNT_LIMIT, "sequences")
    for index, sequence in enumerate(sequences):
        field = f"sampling.bad_token_sequences[{index}]"
        if not 1 <= len(sequence.ids) <= BAD_WORD_TOKEN_LIMIT:
            refuse_value(field, len(sequence.ids), f"1 to {BAD_WORD_TOKEN_LIMIT} tokens long", unit="tokens")
        check_token_ids(sequence.ids, info, field=f"{field}.ids")
    return tuple(dict.fromkeys(tuple(sequence.ids) for sequence in sequences))


DRAFT_TOKEN_LIMIT = 16
DEFAULT_DRAFT_TOKENS = 8
DEFAULT_DRAFT_MODEL_TOKENS = 4
NGRAM_TOKEN_LIMIT = 8
DEFAULT_NGRAM_TOKENS = 3


def speculation_of(proto: speculation_pb2.Speculation) -> Speculation:
    """Return how a request wants to speculate; raises InvalidRequest."""
    if proto.WhichOneof("drafter") is None:
        refuse_value("speculation", "empty", "one with a drafter; set `prompt_lookup` or `draft_model`")
    draft_tokens, ngram_tokens = proto.max_draft_tokens, proto.prompt_lookup.max_ngram_tokens
    if not 0 <= draft_tokens <= DRAFT_TOKEN_LIMIT:
        refuse_value("speculation.max_draft_tokens", draft_tokens, f"1 to {DRAFT_TOKEN_LIMIT}, or absent")
    if not 0 <= ngram_tokens <= NGRAM_TOKEN_LIMIT:
        refuse_value(
            "speculation.prompt_lookup.max_ngram_tokens", ngram_tokens, f"1 to {NGRAM_TOKEN_LIMIT}, or absent"
        )
    if proto.WhichOneof("drafter") == "draft_model":
        return Speculation(draft_tokens or DEFAULT_DRAFT_MODEL_TOKENS, drafting=Drafting.DRAFT_MODEL)
    return Speculation(
        draft_token_limit=draft_tokens or DEFAULT_DRAFT_TOKENS,
        ngram_token_limit=ngram_tokens or DEFAULT_NGRAM_TOKENS,
    )


CHOICE_TEXT_LIMIT = 4096
"""Most texts of one choice."""

_FIELD = "response_format"


def response_format_of(proto: response_format_pb2.ResponseFormat) -> ResponseFormat:
    """Return the form that the request asks for; raises InvalidRequest if it is missing or impossible."""
    kind = proto.WhichOneof("format")
    if proto.compact and kind not in ("json_schema", "json_object"):
        refuse_value(f"{_FIELD}.compact", True, "absent, except with json_schema or json_object")
    if kind == "json_schema":
        return JsonSchema(proto.json_schema, is_compact=proto.compact)
    if kind == "json_object":
        return JsonObject(is_compact=proto.compact)
    if kind == "regex":
        return Regex(proto.regex)
    if kind == "lark":
        return LarkGrammar(proto.lark)
    if kind == "choice" and proto.choice.texts:
        # Each costs time and memory, even an empty one.
        check_count(f"{_FIELD}.choice.texts", len(proto.choice.texts), CHOICE_TEXT_LIMIT, "texts")
        # Formats are cached, and repeated texts change nothing.
        return Choice(tuple(dict.fromkeys(proto.choice.texts)))
    if kind == "choice":
        raise _missing(
            f"{_FIELD}.choice.texts is empty; give at least one text", field=f"{_FIELD}.choice.texts"
        )
    raise _missing(
        f"{_FIELD} is empty; set one of json_schema, json_object, regex, lark and choice, or leave it out",
        field=_FIELD,
    )


def _missing(message: str, *, field: str) -> InvalidRequest:
    return InvalidRequest(Reason.RESPONSE_FORMAT_INVALID, message, field=field)
