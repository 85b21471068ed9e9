"""`icehouse run MODEL`: a server of its own and a conversation with it, in one command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.client.answer_options import answer_options_of
from icehouse_server.cli.terminal.console import AsJson
from icehouse_server.cli.terminal.option_groups import with_groups

if TYPE_CHECKING:
    from icehouse_client import Options

_IN_RAM_ONLY = ("--no-ssd",)
"""Nothing of the conversation is left on disk."""


@with_groups(answer=answer_options_of)
def run(
    model: Annotated[str, typer.Argument(help="What `icehouse serve` takes.", show_default=False)],
    answer: Options,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answers only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model on a free loopback port and talk with it; the server ends with the conversation."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_client import Conversation

    from icehouse_server.cli.client.chat.session import Server, converse
    from icehouse_server.cli.client.connection import EXIT_INTERRUPTED, failing_call_ends
    from icehouse_server.cli.local.server import serving

    status = f"loading {model}, which is fetched the first time"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="icehouse-run-") as scratch,
            serving(status, scratch=Path(scratch), model=model, options=_IN_RAM_ONLY) as (client, address),
            failing_call_ends(address),
        ):
            converse(
                Server(client, address, answer), Conversation(system=system), is_json=as_json, is_quiet=quiet
            )
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
