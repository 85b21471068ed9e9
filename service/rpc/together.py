"""Several prompts of one call as requests that the engine takes in together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.domain.request import GenerationRequest, part_of


def requests_together(
    whole: GenerationRequest, prompts: Sequence[tuple[int, ...]]
) -> tuple[list[int], list[GenerationRequest]]:
    """Return a request for each prompt, like `whole` in everything else, and which prompt each one is of.

    The engine judges requests that come together by the first, so that is the longest.
    """
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    requests = [
        dataclasses.replace(
            whole, request_id=part_of(whole.request_id, rank), prompt_token_ids=prompts[index]
        )
        for rank, index in enumerate(order)
    ]
    return order, requests
