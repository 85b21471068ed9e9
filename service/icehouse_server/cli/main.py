"""Command line: `icehouse serve`, `generate`, `cache`, `key`, `doctor` and what else `--help` lists."""

from __future__ import annotations

import importlib.metadata
import io
import sys
from typing import Annotated

import typer

from icehouse_server.bootstrap.preload import load_openblas
from icehouse_server.cli import flags, key, token
from icehouse_server.cli.cache import commands
from icehouse_server.cli.client import prefix_cache, server, texts
from icehouse_server.cli.client.chat.chat import chat
from icehouse_server.cli.client.generate import generate
from icehouse_server.cli.client.health import health
from icehouse_server.cli.client.top import top
from icehouse_server.cli.flags import SettingsCommand, with_settings
from icehouse_server.cli.local.bench import bench
from icehouse_server.cli.local.run import run
from icehouse_server.cli.service import commands as service_commands
from icehouse_server.cli.terminal.console import AsJson, complain, out, print_json
from icehouse_server.cli.terminal.logs import setup_logging
from icehouse_server.config import LoadedConfig
from icehouse_server.config.load import keep_attention_plans, quiet_grpc
from icehouse_server.errors import ConfigError, IcehouseError

EXIT_FAILURE = 1
EXIT_USAGE = 2

CLIENT_PACKAGE = "icehouse_client"
"""What the commands that ask a server stand on; `serve` does without."""

DEMO_QUESTION = "What is the capital of France?"

app = typer.Typer(
    name="icehouse",
    help="Serve MLX language models over gRPC, with a prefix cache in RAM and on SSD.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _serve(loaded: LoadedConfig) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Each setting is a variable and a key of the file, too."""
    setup_logging(loaded.config.log)
    if loaded.config.engine.preload_enabled:
        load_openblas()
    keep_attention_plans()
    # Imported only now: MLX must find OpenBLAS there.
    from icehouse_server.cli.serve import serve

    serve(loaded)


def _config(loaded: LoadedConfig, as_json: AsJson = False) -> None:
    """Print the effective settings and where each came from."""
    flags.show_config(loaded, as_json=as_json)


def _doctor(loaded: LoadedConfig, as_json: AsJson = False) -> None:
    """Check whether this machine is ready to serve, and say what to do if not."""
    from icehouse_server.cli.doctor.doctor import doctor

    if not doctor(loaded.config, as_json=as_json):
        raise typer.Exit(EXIT_FAILURE)


app.command("serve", cls=SettingsCommand)(with_settings(_serve, takes_model=True))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What the model is asked.")] = DEMO_QUESTION,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="How many tokens it writes.")] = 48,
) -> None:
    """Make the demo model, stream an answer of it, show one prompt cold, from RAM and from SSD."""
    from icehouse_server.cli.local.demo import run_demo

    if not run_demo(question=prompt, max_output_tokens=max_output_tokens):
        raise typer.Exit(EXIT_FAILURE)


app.command("generate")(generate)
app.command("chat")(chat)
app.command("run")(run)
app.command("bench")(bench)
app.command("models")(server.models)
app.command("explain")(prefix_cache.explain)
app.command("warm")(prefix_cache.warm)
app.command("pin")(prefix_cache.pin)
app.command("unpin")(prefix_cache.unpin)
app.command("evict")(prefix_cache.evict)
app.command("stats")(server.stats)
app.command("info")(server.info)
app.command("requests")(server.requests)
app.command("cancel")(server.cancel)
app.command("tokenize")(texts.tokenize)
app.command("detokenize")(texts.detokenize)
app.command("embed")(texts.embed)
app.command("top")(top)
app.command("health")(health)
app.command("doctor", cls=SettingsCommand)(with_settings(_doctor))
app.command("config", cls=SettingsCommand)(with_settings(_config))
app.add_typer(commands.app, name="cache")
app.add_typer(key.app, name="key")
app.add_typer(token.app, name="token")
app.add_typer(service_commands.app, name="service")


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    found = importlib.metadata.version("icehouse")
    if as_json:
        print_json({"version": found})
    else:
        out.print(found)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def icehouse(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Serve MLX language models over gRPC, with a prefix cache in RAM and on SSD."""


def main() -> None:
    """Run the command line; operating errors become one line and an exit code."""
    quiet_grpc()
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding shows a question mark for what it lacks; nothing may end by that.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Whatever the locale: what is no UTF-8 is told where the text is sent.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        app()
    except IcehouseError as error:
        complain(error.message)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)
    except ModuleNotFoundError as error:
        if error.name != CLIENT_PACKAGE:
            raise
        complain(
            "commands that ask a server need the Python client, which is not installed; "
            "`pip install -e clients/python` in Icehouse's folder"
        )
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
