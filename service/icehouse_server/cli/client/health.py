"""`icehouse health`: whether a server takes requests, as an exit code, for probes of containers."""

from __future__ import annotations

from typing import Annotated

import typer

from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups


@with_groups(target=target_of)
def health(
    target: Target,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Give up after so many seconds.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Ask whether a server takes requests; exit code 0 when it does."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.cli.client.connection import connected

    with connected(target) as client:
        status = client.health(timeout_s=timeout_s)
    if as_json:
        print_json({"status": status})
    else:
        out.print(status)
    if status != "SERVING":
        raise typer.Exit(1)
