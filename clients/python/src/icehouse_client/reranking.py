"""Rerank requests from plain arguments, and plain rankings from their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from icehouse.v1 import rerank_service_pb2 as messages

from icehouse_client.cache import CacheOptions, cache_policy
from icehouse_client.options import refuse_unknown
from icehouse_client.texts import names_bad_texts


class RerankOptions(CacheOptions, total=False):
    """What may be said beside the query and the documents. Left out: the server's default."""

    instruction: str
    """The task, in words for the model."""
    top_count: int
    """How many of the best to return; 0 is all."""
    system: str
    """The system turn of a prompt of your own, with `user`."""
    user: str
    """The user's turn; `{query}` and `{document}` must occur in the two, `{instruction}` may."""
    text: str
    """A prompt of your own in plain text, instead of turns."""
    positive_answer: str
    negative_answer: str
    model: str
    adapter: str
    request_id: str
    priority: int
    timeout_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked:
    """One document: its place in the request, and its probability of answering the query."""

    index: int
    score: float
    log_odds: float


class Ranking(list[Ranked]):
    """The documents, best first, and what they cost."""

    request_id: str
    model: str
    prompt_tokens: int
    """Tokens of all prompts, of which `cached_tokens` came from the cache."""
    cached_tokens: int

    @classmethod
    def of(cls, response: messages.RerankResponse) -> Self:
        """Return the plain form of an answer."""
        made = cls(Ranked(result.index, result.score, result.log_odds) for result in response.results)
        made.request_id, made.model = response.request_id, response.model
        made.prompt_tokens, made.cached_tokens = response.prompt_tokens, response.cached_tokens
        return made


@names_bad_texts
def rerank_request(query: str, documents: Sequence[str], options: RerankOptions) -> messages.RerankRequest:
    """Return the message of Rerank."""
    refuse_unknown(options, RerankOptions)
    if isinstance(documents, str):
        raise TypeError("documents is a list of texts, not one text")
    if "text" in options and ("system" in options or "user" in options):
        raise TypeError("a prompt is made of `text` or of `system` and `user`, not of both")
    request = messages.RerankRequest(
        request_id=options.get("request_id", ""),
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
        query=query,
        documents=documents,
        instruction=options.get("instruction", ""),
        top_count=options.get("top_count", 0),
        positive_answer=options.get("positive_answer", ""),
        negative_answer=options.get("negative_answer", ""),
        priority=options.get("priority", 0),
        cache=cache_policy(options),
    )
    if "text" in options:
        request.text = options["text"]
    if "system" in options or "user" in options:
        request.turns.system = options.get("system", "")
        request.turns.user = options.get("user", "")
    return request
