"""Answer options: how long an answer may be and how its tokens are drawn, alike for `generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from icehouse_client import Options

_MOST_TOKENS = 2**31 - 1
"""What a request can say; the server's own limit is far below."""


def answer_options_of(
    max_output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MOST_TOKENS, help="Most tokens to generate; by default the server's choice."
        ),
    ] = None,
    max_reasoning_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_MOST_TOKENS,
            help="Most tokens to think with before a chat's answer; 0 answers at once.",
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed draws the same text.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=0.001, help="Give up after so many seconds.")] = None,
) -> Options:
    """Return what is said of them to the Python client."""
    options: Options = {"stop": stop or (), "timeout_s": timeout_s}
    if max_output_tokens is not None:
        options["max_output_tokens"] = max_output_tokens
    if max_reasoning_tokens is not None:
        options["max_reasoning_tokens"] = max_reasoning_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if top_p is not None:
        options["top_p"] = top_p
    if seed is not None:
        options["seed"] = seed
    return options
