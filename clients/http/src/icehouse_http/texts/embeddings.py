"""Embeddings of texts or tokens."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from icehouse_client import AsyncClient, Embeddings, EmbedOptions

from icehouse_http.errors import bad_request, refusing_by
from icehouse_http.field_names import FieldNames
from icehouse_http.fields import INT32_MAX, Fields, is_list_of
from icehouse_http.serving.request_ids import named
from icehouse_http.upstream import Target

_NAMES = FieldNames(others={"inputs": "input", "adapter": "model"})


async def embeddings(
    client: AsyncClient, fields: Fields, target: Target, *, request_id: str
) -> dict[str, Any]:
    """Return the answer of /v1/embeddings; `prompt_name` is Icehouse's own field."""
    inputs = _inputs_of(fields)
    is_float = fields.one_of("encoding_format", "float", "base64", default="float") == "float"
    options: EmbedOptions = {"model": target.model.id, "adapter": target.adapter}
    if (dimensions := fields.integer("dimensions", least=1, most=INT32_MAX)) is not None:
        options["dimensions"] = dimensions
    options["prompt_name"] = fields.text("prompt_name")

    async def ask(name: str) -> Embeddings:
        options["request_id"] = name
        return await client.embed(inputs, **options)

    try:
        with refusing_by(_NAMES):
            found = await named(request_id, ask)
    except ValueError as error:
        raise bad_request(str(error), param="input") from error
    return {
        "object": "list",
        "model": found.model,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": vector if is_float else _packed(vector),
            }
            for index, vector in enumerate(found)
        ],
        "usage": {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens},
    }


def _inputs_of(fields: Fields) -> Sequence[str | Sequence[int]]:
    given = fields.raw("input")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if is_list_of(given, str):
            return given
        many = [given] if is_list_of(given, int) else given
        if all(item and is_list_of(item, int) and _are_ids(item) for item in many):
            return many
    raise fields.refusal("input", "must be a string, a list of token ids, or a list of either")


def _are_ids(numbers: Sequence[int]) -> bool:
    return all(0 <= number <= INT32_MAX for number in numbers)


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
