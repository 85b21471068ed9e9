"""Rankings of documents, in a form that clients of Cohere's and of Jina's API both read."""

from __future__ import annotations

from typing import Any

from icehouse_client import AsyncClient, Ranked, Ranking, RerankOptions

from icehouse_http.errors import bad_request, refusing_by
from icehouse_http.field_names import FieldNames
from icehouse_http.fields import INT32_MAX, Fields
from icehouse_http.serving.request_ids import named
from icehouse_http.upstream import Target

_NAMES = FieldNames(others={"adapter": "model", "top_count": "top_n"})


async def ranking(
    client: AsyncClient, fields: Fields, target: Target, *, name: str, request_id: str
) -> dict[str, Any]:
    """Return the answer of /v1/rerank; instruction and answers are Icehouse's own fields."""
    documents = _documents_of(fields)
    returns_documents = fields.flag("return_documents")
    options: RerankOptions = {"model": target.model.id, "adapter": target.adapter}
    if (top_count := fields.integer("top_n", least=1, most=INT32_MAX)) is not None:
        options["top_count"] = top_count
    options["instruction"] = fields.text("instruction")
    options["positive_answer"] = fields.text("positive_answer")
    options["negative_answer"] = fields.text("negative_answer")
    query = fields.required_text("query")

    async def ask(name: str) -> Ranking:
        options["request_id"] = name
        return await client.rerank(query, documents, **options)

    try:
        with refusing_by(_NAMES):
            found = await named(request_id, ask)
    except ValueError as error:
        raise bad_request(str(error)) from error

    def told(ranked: Ranked) -> dict[str, Any]:
        entry = {"index": ranked.index, "relevance_score": ranked.score}
        return entry | ({"document": {"text": documents[ranked.index]}} if returns_documents else {})

    return {
        "id": name,
        "object": "list",
        "model": found.model,
        "results": [told(ranked) for ranked in found],
        "usage": {
            "prompt_tokens": found.prompt_tokens,
            "total_tokens": found.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": found.cached_tokens},
        },
        "meta": {"tokens": {"input_tokens": found.prompt_tokens, "output_tokens": 0}},
    }


def _documents_of(fields: Fields) -> list[str]:
    """Return the documents, each a text or an object with one."""
    documents = [
        item
        if isinstance(item, str)
        else Fields(item, f"{fields.place_of('documents')}[{index}]").text("text")
        for index, item in enumerate(fields.items("documents"))
    ]
    if not documents:
        raise fields.refusal("documents", "must have at least one document")
    return documents
