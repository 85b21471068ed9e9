"""`Speculation` of a request to domain data and back; every refusal names its field. Pure functions."""

from __future__ import annotations

from icehouse.v1 import speculation_pb2

from icehouse_server.domain.request import Drafting, Speculation, SpeculationLimit
from icehouse_server.rpc.messages.validation import refuse_value

DRAFT_TOKEN_LIMIT = 16
DEFAULT_DRAFT_TOKENS = 8
DEFAULT_DRAFT_MODEL_TOKENS = 4
NGRAM_TOKEN_LIMIT = 8
DEFAULT_NGRAM_TOKENS = 3

LIMITS = {
    SpeculationLimit.NONE: speculation_pb2.SPECULATION_LIMIT_UNSPECIFIED,
    SpeculationLimit.CACHE: speculation_pb2.SPECULATION_LIMIT_CACHE,
    SpeculationLimit.SAMPLING: speculation_pb2.SPECULATION_LIMIT_SAMPLING,
    SpeculationLimit.NO_DRAFT_MODEL: speculation_pb2.SPECULATION_LIMIT_NO_DRAFT_MODEL,
    SpeculationLimit.ACCEPTANCE: speculation_pb2.SPECULATION_LIMIT_ACCEPTANCE,
}


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
