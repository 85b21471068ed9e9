"""The command line: `icehouse serve | demo | generate | doctor | config | version`."""

from __future__ import annotations

import importlib.metadata
import sys

import typer

from service.cli import show_config
from service.cli.console import complain, out
from service.cli.flags import with_settings
from service.config import LoadedConfig
from service.errors import ConfigError, IcehouseError

EXIT_FAILURE = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="icehouse",
    help="Serve MLX language models over gRPC, with a prefix cache in RAM and on SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _serve(loaded: LoadedConfig) -> None:
    """Serve a model until SIGTERM or Ctrl-C."""
    from service.cli.serve import serve

    serve(loaded)


def _config(loaded: LoadedConfig) -> None:
    """Print the effective settings and where each came from."""
    show_config.show_config(loaded)


app.command("serve")(with_settings(_serve))
app.command("config")(with_settings(_config))


@app.command()
def version() -> None:
    """Print the version."""
    out.print(importlib.metadata.version("icehouse"))


def main() -> None:
    """Run the command line; operating errors become one line and an exit code."""
    try:
        app()
    except IcehouseError as error:
        complain(error.message)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)


if __name__ == "__main__":
    main()
