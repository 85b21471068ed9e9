"""Token count of a prompt that is not run."""

from __future__ import annotations

from typing import Any

from icehouse_client import AsyncClient, IcehouseClientError

from icehouse_http.errors import bad_request, refusing_by
from icehouse_http.exchange import Asked
from icehouse_http.messages.request import prompt_options

_COUNTED_OTHERWISE = ("CACHE_UNSUPPORTED", "PROMPT_TOO_LONG")
"""Reasons for which Explain, which knows every option of a prompt, refuses one that Tokenize can count."""


async def token_count(client: AsyncClient, asked: Asked) -> int:
    """Return how many tokens the prompt has; raises ApiError for one that no message can hold."""
    prompt: Any = asked.prompt
    options = prompt_options(asked, prompt)
    with refusing_by(asked.names):
        return await _count(client, prompt, options)


async def _count(client: AsyncClient, prompt: Any, options: dict[str, Any]) -> int:
    try:
        return (await client.cache.explain(prompt, **options)).prompt_tokens
    except ValueError as error:
        raise bad_request(str(error)) from error
    except IcehouseClientError as error:
        if error.reason not in _COUNTED_OTHERWISE:
            raise
    return len(await client.tokenize(prompt, model=options["model"], tools=options.get("tools", ())))
