"""Model list: the served models, their adapters and the aliases, each a model to those who choose one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from icehouse.v1.model_service_pb2 import Model

from icehouse_http.errors import ApiError


def model_list(models: Sequence[Model], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the list in a form that OpenAI's and Anthropic's clients both read."""
    entries = [_entry(name, model) for name, model in _names(models, aliases).items()]
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }


def one_model(models: Sequence[Model], aliases: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return one entry of the list; raises ApiError for a name that is not in it."""
    names = _names(models, aliases)
    if name not in names:
        message = f"the model {name!r} is not served; {', '.join(names)} can be named"
        raise ApiError(404, message, code="model_not_found", param="model")
    return _entry(name, names[name])


def _names(models: Sequence[Model], aliases: Mapping[str, str]) -> dict[str, Model]:
    names = {model.id: model for model in models}
    names |= {alias: model for model in models for alias in model.aliases}
    names |= {adapter.name: model for model in models for adapter in model.adapters}
    return names | {alias: names[name] for alias, name in aliases.items() if name in names}


def _entry(name: str, model: Model) -> dict[str, Any]:
    # Of a model that was never loaded it is not known.
    context_tokens = model.context_tokens or None
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "owned_by": "icehouse",
        "root": model.id,
        "max_model_len": context_tokens,
        "max_input_tokens": context_tokens,
    }
