"""`icehouse health`: whether a server takes requests, as an exit code, for probes of containers."""

from __future__ import annotations

from typing import Annotated

import typer

from icehouse_server.cli.terminal import client_options
from icehouse_server.cli.terminal.console import complain, out


def health(
    address: client_options.Address = None,
    timeout_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 5.0,
    token: client_options.Token = None,
    tls: client_options.Tls = False,
    ca: client_options.Ca = None,
    certificate: client_options.Certificate = None,
    key: client_options.Key = None,
) -> None:
    """Ask whether a server takes requests; exit code 0 when it does."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.rpc.client.generate import CallFailed
    from icehouse_server.rpc.client.health import health_status

    access = client_options.access_of(token=token, tls=tls, ca=ca, certificate=certificate, key=key)
    try:
        status = health_status(client_options.resolved(address), access, timeout_s=timeout_s)
    except CallFailed as error:
        complain(str(error))
        raise typer.Exit(1) from error
    out.print(status)
    if status != "SERVING":
        raise typer.Exit(1)
