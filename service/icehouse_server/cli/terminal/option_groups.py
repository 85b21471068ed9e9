"""Option groups: parameters that many commands share, declared once as a function's.

A group is a function; its parameters become options of each command that wants what it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_groups(**groups: Callable[..., object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters of a command by those of the groups that make their values."""

    def grouped(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        members = {name: _parameters(group) for name, group in groups.items()}

        def run(**given: Any) -> None:
            made = {
                name: group(**{member: given.pop(member) for member in members[name]})
                for name, group in groups.items()
            }
            command(**given, **made)

        parameters = _spliced(own, members, command)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        return run

    return grouped


def _spliced(
    own: Mapping[str, inspect.Parameter],
    members: Mapping[str, Mapping[str, inspect.Parameter]],
    command: Callable[..., None],
) -> list[inspect.Parameter]:
    spliced: list[inspect.Parameter] = []
    for name, parameter in own.items():
        spliced += members[name].values() if name in members else [_evaluated(parameter, command)]
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in spliced]


def _parameters(group: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(group).parameters
    return {name: _evaluated(parameter, group) for name, parameter in parameters.items()}


def _evaluated(parameter: inspect.Parameter, function: Callable[..., object]) -> inspect.Parameter:
    """Return a parameter with its annotation as a type. What a group makes is known to type checkers only."""
    if not isinstance(parameter.annotation, str):
        return parameter
    return parameter.replace(annotation=eval(parameter.annotation, inspect.unwrap(function).__globals__))
