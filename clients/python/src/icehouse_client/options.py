"""Refusal of options that no request has: type checkers see them, a running program would drop them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Choice = TypeVar("Choice")

MEANT = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "n": "completions",
    "best_of": "completions",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
    "guided_json": "response_format",
    "functions": "tools",
    "thinking_token_budget": "max_reasoning_tokens",
    "budget_tokens": "max_reasoning_tokens",
    "chat_template_kwargs": "template_arguments",
    "timeout": "timeout_s",
    "top_n": "top_count",
}
"""Our option by its name in other APIs."""


def refuse_unknown(options: Mapping[str, Any], known: type[Any]) -> None:
    """Raise TypeError for a key that the TypedDict `known` lacks, with the one that may be meant."""
    names = known.__annotations__
    for name in options:
        if name not in names:
            raise TypeError(f"there is no option {name!r}; {hint_of(name, names)}")


def refuse_one_text(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise TypeError for one text where there must be several: each of its letters would count as one."""
    for name in names:
        if isinstance(options.get(name), str):
            raise TypeError(f"{name} is a list of texts, not one text")


def chosen(name: str, value: object, known: Mapping[str, Choice]) -> Choice:
    """Return what an option's word stands for; raises ValueError for one that it does not know."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}")
    return known[value]


def hint_of(name: str, names: Iterable[str]) -> str:
    """Return which of `names` an unknown one may mean, or all of them."""
    known = sorted(names)
    meant = [MEANT[name]] if MEANT.get(name) in known else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {meant[0]!r}?" if meant else f"there are {', '.join(known)}"
