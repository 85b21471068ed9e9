"""Embedding requests from plain arguments, and plain vectors from their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, TypedDict

from icehouse.v1 import embedding_service_pb2 as messages

from icehouse_client.options import chosen, refuse_unknown
from icehouse_client.texts import names_bad_texts

Pooling = Literal["last_token", "mean"]

_POOLINGS = {"last_token": messages.POOLING_LAST_TOKEN, "mean": messages.POOLING_MEAN}


class EmbedOptions(TypedDict, total=False):
    """What may be said beside the inputs. Left out: the server's default."""

    pooling: Pooling
    normalize: bool
    dimensions: int
    prompt_name: str
    """One of the model's own prompts, such as "query", whose text is put before each text."""
    model: str
    adapter: str
    request_id: str
    priority: int
    timeout_s: float | None


class Embeddings(list[list[float]]):
    """A vector for each input, in their order, and what they cost."""

    request_id: str
    model: str
    prompt_tokens: int
    """Tokens of all inputs."""

    @classmethod
    def of(cls, response: messages.EmbedResponse) -> Self:
        """Return the plain form of an answer."""
        made = cls(list(embedding.values) for embedding in response.embeddings)
        made.request_id, made.model = response.request_id, response.model
        made.prompt_tokens = response.prompt_tokens
        return made


@names_bad_texts
def embed_request(inputs: Sequence[str | Sequence[int]], options: EmbedOptions) -> messages.EmbedRequest:
    """Return the message of Embed; each input is a text or token ids."""
    refuse_unknown(options, EmbedOptions)
    if isinstance(inputs, str):
        raise TypeError("inputs is a list of texts, not one text")
    request = messages.EmbedRequest(
        request_id=options.get("request_id", ""),
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
        dimensions=options.get("dimensions", 0),
        priority=options.get("priority", 0),
        prompt_name=options.get("prompt_name", ""),
        normalize=options.get("normalize"),
    )
    if "pooling" in options:
        request.pooling = chosen("pooling", options["pooling"], _POOLINGS)
    for item in inputs:
        if isinstance(item, str):
            request.inputs.add(text=item)
        else:
            request.inputs.add().tokens.ids.extend(item)
    return request
