"""Field names of the worker protocol in refusals of the API's checks, which know their own names only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from icehouse_server.errors import IcehouseError

SENT_AS = {
    "completions": "sampling_params.n",
    "inputs[0].tokens": "tokenized.input_ids",
    "inputs[0].tokens.ids": "tokenized.input_ids",
    "inputs[0]": "tokenized",
    "logprobs.top_count": "sampling_params.logprobs",
    "max_output_tokens": "sampling_params.max_tokens",
    "prompt": "input",
    "response_format": "sampling_params",
    "response_format.choice.texts": "sampling_params.choice.choices",
    "response_format.choice": "sampling_params.choice",
    "response_format.json_object": "sampling_params.json_object",
    "response_format.json_schema": "sampling_params.json_schema",
    "response_format.lark": "sampling_params.grammar",
    "response_format.regex": "sampling_params.regex",
    "sampling": "sampling_params",
    "sampling.ignore_end_tokens": "sampling_params.ignore_eos",
    "sampling.min_output_tokens": "sampling_params.min_tokens",
    "stop": "sampling_params.stop",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "tokens": "tokenized.input_ids",
    "tokens.ids": "tokenized.input_ids",
}
"""Names of the API and what a gateway calls them; the rest of a longer name follows as it is."""


def sent_name(field: str) -> str:
    """Return what a field of the API's request is called by who sent this protocol's."""
    for known in sorted(SENT_AS, key=len, reverse=True):
        rest = field.removeprefix(known)
        if rest != field and (not rest or rest[0] in ".["):
            return SENT_AS[known] + rest
    return field


@contextlib.contextmanager
def named_as_sent() -> Iterator[None]:
    """Have a refusal out of the block name the field that the gateway set."""
    try:
        yield
    except IcehouseError as error:
        if error.field is None or (name := sent_name(error.field)) == error.field:
            raise
        raise type(error)(
            error.reason,
            _renamed(error.message, error.field, name),
            field=name,
            retry_after_s=error.retry_after_s,
            metadata={**error.metadata, **({"field": name} if "field" in error.metadata else {})},
        ) from error


def _renamed(message: str, field: str, name: str) -> str:
    # Some names are words as well, such as "tokens": only what stands for the field is changed.
    if message.startswith(f"{field} "):
        return name + message[len(field) :]
    return message.replace(f"`{field}`", f"`{name}`")
