"""`icehouse token new`: make a bearer token and the line of the token file that accepts it."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer
from icehouse_client.cli.console import AsJson, err, out, print_json
from icehouse_client.cli.main import CommandLine

from icehouse_server.errors import ConfigError, Reason

app = CommandLine(help="Make bearer tokens for callers.")


@app.callback()
def token() -> None:
    """Keep `new` a command of its own, whatever else comes."""


@app.command()
def new(
    tenant: Annotated[
        str, typer.Option(help="Tenant that the token is for: A-Z a-z 0-9 . _ : / @ -, 128 at most.")
    ],
    operator: Annotated[
        bool, typer.Option("--operator", help="Allow it to act for all tenants and manage the whole cache.")
    ] = False,
    days: Annotated[int | None, typer.Option(min=1, help="Days until it expires; by default never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a new token, this once, and its line for the token file, which holds only a hash."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.rpc.access.caller import CallerRole
    from icehouse_server.rpc.access.tokens import TENANT_PATTERN, line_of, new_token

    if TENANT_PATTERN.fullmatch(tenant) is None:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"--tenant is {tenant!r}; it must have 1 to 128 of A-Z a-z 0-9 . _ : / @ -",
            field="tenant",
        )
    made = new_token()
    role = CallerRole.OPERATOR if operator else CallerRole.TENANT
    today = datetime.datetime.now(datetime.UTC).date()
    expire_date = None if days is None else today + datetime.timedelta(days=days)
    line = line_of(made, tenant=tenant, role=role, expire_date=expire_date)
    if as_json:
        print_json({"token": made, "line": line})
        return
    err.print("the token, for the caller; it is shown only once:")
    out.print(made, markup=False)
    err.print("the line for the file that --token-file names (chmod 600); a running server picks it up:")
    out.print(line, markup=False)
