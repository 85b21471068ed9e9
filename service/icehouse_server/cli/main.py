"""Command line: `icehouse serve`, `generate`, `cache`, `key`, `doctor` and the others that `--help` lists."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from typing import Annotated

import typer
from icehouse_client.cli import console
from icehouse_client.cli import main as client
from icehouse_client.cli.console import EXIT_FAILURE, EXIT_USAGE, AsJson, complain
from icehouse_client.cli.main import CACHE, MANAGE, MODELS, CommandLine

from icehouse_server.bootstrap.imports.lean_transformers import import_mlx_lm
from icehouse_server.bootstrap.imports.openblas import load_openblas
from icehouse_server.cli import model_commands, token
from icehouse_server.cli.flags import SettingsCommand, show_config, with_settings
from icehouse_server.cli.later_group import group_in
from icehouse_server.cli.local.bench import bench
from icehouse_server.cli.local.run import run
from icehouse_server.cli.service import service_commands
from icehouse_server.cli.terminal.first_words import first_words
from icehouse_server.cli.terminal.logs import setup_logging
from icehouse_server.config import LoadedConfig, load_config
from icehouse_server.config.load import enlarge_attention_plan_cache
from icehouse_server.errors import ConfigError, IcehouseError

DEMO_QUESTION = "What is the capital of France?"

SERVE = "Serve"
"""The group of commands that the client's command line lacks."""

app = CommandLine(
    name="icehouse", help="Serve MLX language models over gRPC, with a prefix cache in RAM and on SSD."
)


def _serve(loaded: LoadedConfig) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Settings can also come from variables or the config file."""
    setup_logging(loaded.config.log)
    if loaded.config.engine.preload_enabled:
        load_openblas()
    enlarge_attention_plan_cache()
    # Imported objects stay: searching all of them for garbage took an eighth of the time.
    gc.disable()
    if not loaded.config.model.trust_remote_code:
        import_mlx_lm()
    # Imported only now: MLX must find OpenBLAS already loaded.
    from icehouse_server.cli.serve import serve

    gc.enable()
    with first_words(loaded):
        serve(loaded)


def _doctor(loaded: LoadedConfig, as_json: AsJson = False) -> None:
    """Check whether this machine is ready to serve, and say what to do if not."""
    import_mlx_lm()
    from icehouse_server.cli.doctor import doctor

    if not doctor(loaded.config, as_json=as_json):
        raise typer.Exit(EXIT_FAILURE)


_PASSES_ALL_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("serve", cls=SettingsCommand, rich_help_panel=SERVE)(with_settings(_serve, takes_model=True))
app.command("run", rich_help_panel=SERVE)(run)


@app.command(rich_help_panel=SERVE)
def demo(
    prompt: Annotated[str, typer.Option(help="Question for the model.")] = DEMO_QUESTION,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of the answer.")] = 48,
) -> None:
    """Build the demo model, stream an answer, and show one prompt cold, from RAM and from SSD."""
    from icehouse_server.cli.local.demo import run_demo

    if not run_demo(question=prompt, max_output_tokens=max_output_tokens):
        raise typer.Exit(EXIT_FAILURE)


@app.command("http", add_help_option=False, context_settings=_PASSES_ALL_ON, rich_help_panel=SERVE)
def http(context: typer.Context) -> None:
    """Offer OpenAI's and Anthropic's HTTP APIs for any Icehouse server; the same as `icehouse-http`."""
    from icehouse_http.command import main as front

    front(context.args)


app.registered_commands += client.app.registered_commands
for command in (model_commands.pull, model_commands.ls, model_commands.rm):
    app.command(rich_help_panel=MODELS)(command)
app.command("bench", rich_help_panel=MANAGE)(bench)
app.command("doctor", cls=SettingsCommand, rich_help_panel=MANAGE)(with_settings(_doctor))
app.command("config", cls=SettingsCommand, rich_help_panel=MANAGE)(with_settings(show_config))
app.add_typer(service_commands.app, name="service", rich_help_panel=SERVE)
app.add_typer(
    CommandLine(help="Inspect and check the SSD tier's directory; move or remove its blocks."),
    name="cache",
    cls=group_in("icehouse_server.cli.cache_directory"),
    rich_help_panel=CACHE,
)
app.add_typer(
    CommandLine(help="Create or change the key that encrypts blocks on SSD."),
    name="key",
    cls=group_in("icehouse_server.cli.key"),
    rich_help_panel=CACHE,
)
app.add_typer(token.app, name="token", rich_help_panel=MANAGE)


@app.command(rich_help_panel=MANAGE)
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    installed = importlib.metadata.version("icehouse")
    console.show({"version": installed}, installed, as_json=as_json)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def icehouse(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Serve MLX language models over gRPC, with a prefix cache in RAM and on SSD."""
    context.obj = lambda: load_config().config.server.local_address


def main() -> None:
    """Run the command line; operating errors become one line and an exit code."""
    try:
        console.run(app)
    except IcehouseError as error:
        complain(error.message)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE)


if __name__ == "__main__":
    main()
