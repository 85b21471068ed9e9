"""Refusal of texts that no message can hold: half of a surrogate pair is no character and has no UTF-8.

Such texts come from file names and pipes that are read with `surrogateescape`, and from JSON that was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def names_bad_texts(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have a maker of messages raise a ValueError that says which of its texts is at fault, and where."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except UnicodeEncodeError as error:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                _refuse_bad_text(value, _place_of(name, value), cause=error)
            raise

    return made


def _place_of(name: str, value: object) -> str:
    """Return what callers know an argument by: options by their own names, a chat by its messages."""
    if name == "options":
        return ""
    is_chat = name == "prompt" and isinstance(value, Sequence) and not isinstance(value, str)
    return "messages" if is_chat else name


def _refuse_bad_text(value: Any, place: str, *, cause: UnicodeEncodeError) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place} has half of a surrogate pair, {value[error.start]!r}, at index {error.start}: no "
                "character, so it cannot be sent; decode the text with errors='replace'"
            ) from cause
        return
    for name, part in _parts_of(value):
        _refuse_bad_text(name, f"a key of {place or 'the options'}", cause=cause)
        _refuse_bad_text(part, place + name if place else name.removeprefix("."), cause=cause)


def _parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what a value consists of, each with how it is named behind the value's own name."""
    if isinstance(value, Mapping):
        return [(f".{key}", part) for key, part in value.items() if isinstance(key, str)]
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return ()
