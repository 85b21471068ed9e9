"""Option groups: parameters that many commands share, declared once as a function's.

A group is a function; its parameters become options of each command that wants what it returns. What is a
context manager is entered, and the command gets what that yields.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import typer

count = functools.partial(typer.Option, max=2**31 - 1)
"""An option for a number that a request can say; the server's own limit is far below."""

timeout = functools.partial(typer.Option, min=0.001, max=1e9, help="Give up after this many seconds.")


def with_groups(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters of a command by those of the groups that make their values."""

    def grouped(command: Callable[..., None]) -> Callable[..., None]:
        members = {name: _parameters(group) for name, group in groups.items()}

        def run(**given: Any) -> None:
            with contextlib.ExitStack() as stack:
                for name, group in groups.items():
                    made = group(**{member: given.pop(member) for member in members[name]})
                    is_entered = isinstance(made, contextlib.AbstractContextManager)
                    given[name] = stack.enter_context(made) if is_entered else made
                command(**given)

        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, own in _parameters(command, but=groups).items()
            for each in (members[name].values() if name in members else (own,))
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        return run

    return grouped


def said(**options: object) -> Any:
    """Return those options of a call that the command line names; the server decides on all others."""
    return {name: value for name, value in options.items() if value not in (None, "")}


def _parameters(
    function: Callable[..., object], *, but: Collection[str] = ()
) -> dict[str, inspect.Parameter]:
    """Return parameters with their annotations as types, but those that groups make: type checkers' only."""
    names = inspect.unwrap(function).__globals__
    return {
        name: each.replace(annotation=eval(each.annotation, names))
        if isinstance(each.annotation, str) and name not in but
        else each
        for name, each in inspect.signature(function).parameters.items()
    }
