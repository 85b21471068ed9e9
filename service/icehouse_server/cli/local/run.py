"""`icehouse run MODEL`: a server of its own and a conversation with it, in one command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from icehouse_client import Conversation, Options
from icehouse_client.cli.chat import Quiet, System, converse
from icehouse_client.cli.connection import Server, failing_call_ends
from icehouse_client.cli.console import EXIT_INTERRUPTED, AsJson
from icehouse_client.cli.generate import answer_options_of
from icehouse_client.cli.option_groups import with_groups

from icehouse_server.cli.local.child_server import serving

_IN_RAM_ONLY = ("--no-ssd",)
"""Leaves nothing of the conversation on disk."""


@with_groups(answer=answer_options_of)
def run(
    model: Annotated[
        str, typer.Argument(help="Model to serve, as for `icehouse serve`.", show_default=False)
    ],
    answer: Options,
    system: System = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model on a free loopback port and chat with it; the server stops when the chat ends."""
    status = f"loading {model}, which is downloaded the first time"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="icehouse-run-") as scratch,
            serving(status, scratch=Path(scratch), model=model, options=_IN_RAM_ONLY) as (client, address),
            failing_call_ends(address),
        ):
            talk = Conversation(system=system)
            converse(Server(client, address), talk, answer, as_json=as_json, is_quiet=quiet)
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
