"""Texts and tokens: `icehouse tokenize`, `detokenize` and `embed`."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from icehouse_server.cli.client.prompt_options import (
    STANDARD_INPUT,
    GivenPrompt,
    Suffix,
    prompt_of,
    read_token_ids,
)
from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, out, print_json, print_text
from icehouse_server.cli.terminal.option_groups import with_groups
from icehouse_server.cli.top.view import printable

if TYPE_CHECKING:
    from icehouse_client import EmbedOptions


@with_groups(target=target_of, prompt=prompt_of)
def tokenize(
    prompt: GivenPrompt,
    target: Target,
    suffix: Suffix = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Print the ids in one line, as --tokens takes them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tokens of a text or of a conversation, as the model is given them."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_client import Conversation, Infill

    from icehouse_server.cli.client.connection import connected

    asked = prompt.read_around(suffix)
    if not isinstance(asked, str | Conversation | Infill):
        raise typer.BadParameter("--tokens are tokens already; say TEXT or --messages")
    with connected(target) as client:
        tokens = client.tokenize(asked, model=prompt.model)
    if as_json:
        print_json([{"id": token.id, "piece": token.piece} for token in tokens])
    elif ids:
        out.print(",".join(str(token.id) for token in tokens), markup=False)
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(justify="right")
        for token in tokens:
            table.add_row(str(token.id), Text(printable(token.piece)))
        out.print(table)
        out.print(f"{len(tokens):,} tokens")


@with_groups(target=target_of)
def detokenize(
    target: Target,
    tokens: Annotated[
        str, typer.Argument(help="Token ids, with commas or spaces between; - reads standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the text of tokens, without those that begin, end or pad a text."""
    from icehouse_server.cli.client.connection import connected

    token_ids = read_token_ids(sys.stdin.read() if tokens == STANDARD_INPUT else tokens)
    with connected(target) as client:
        text = client.detokenize(token_ids)
    if as_json:
        print_json({"text": text})
    else:
        print_text(text, end="\n")


class Pooling(enum.StrEnum):
    """How the vectors of an input's tokens become one."""

    LAST_TOKEN = "last_token"
    MEAN = "mean"


@with_groups(target=target_of)
def embed(
    target: Target,
    texts: Annotated[list[str], typer.Argument(help="What to embed; - reads lines of standard input.")],
    pooling: Annotated[
        Pooling | None, typer.Option(help="How tokens become one vector; by default as the server says.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep the first so many.")] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Whether vectors have length 1; by default so.")
    ] = None,
    model: Annotated[str, typer.Option(help="Refuse unless it is served.", show_default=False)] = "",
    adapter: Annotated[str, typer.Option(help="One of the model's LoRA adapters.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Print the vector of each text: a line for each, or with --json a list with the texts."""
    from icehouse_server.cli.client.connection import connected

    inputs = sys.stdin.read().splitlines() if texts == [STANDARD_INPUT] else texts
    options: EmbedOptions = {"model": model, "adapter": adapter}
    if pooling is not None:
        options["pooling"] = "mean" if pooling is Pooling.MEAN else "last_token"
    if dimensions is not None:
        options["dimensions"] = dimensions
    if normalize is not None:
        options["normalize"] = normalize
    with connected(target) as client:
        vectors = client.embed(inputs, **options)
    if as_json:
        print_json(
            [{"text": text, "vector": v} for text, v in zip(inputs, vectors, strict=True)], indent=None
        )
        return
    for vector in vectors:
        print_json(vector, indent=None)
