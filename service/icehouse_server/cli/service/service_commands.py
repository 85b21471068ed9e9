"""`icehouse service install | uninstall | status`: have systemd or launchd run the server for this user."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from icehouse_client.cli.console import EXIT_FAILURE, AsJson, complain, err, expanded, out, print_json
from icehouse_client.cli.main import CommandLine

from icehouse_server.cli.service.managers import (
    DefinitionFile,
    Launchd,
    ServiceDefinition,
    ServiceError,
    ServiceFileState,
    Systemd,
)
from icehouse_server.cli.service.stop_bounds import stop_bound_s
from icehouse_server.config import load_config
from icehouse_server.config.load import CLIENT_VARIABLES, FILE_VARIABLE, environment

app = CommandLine(help="Run the server as a systemd or launchd service.")


_STOP_MARGIN_S = 3
"""Time after the limit of a clean stop before whatever stops the server kills it."""

_LEFT_OUT_PREFIXES = ("ICEHOUSE_", "HF_", "XDG_CACHE_HOME")
"""Prefixes of variables that change what a server does, but are not passed on to a service."""

Force = Annotated[bool, typer.Option("--force", help="Go on even if the file was edited by hand.")]


@app.command()
def install(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model to serve, as for `serve`; by default the file's."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the settings; the service uses no others.")
    ] = None,
    http_port: Annotated[
        str | None,
        typer.Option(metavar="N", help="Port of OpenAI's and Anthropic's HTTP APIs; by default the file's."),
    ] = None,
    shows_only: Annotated[bool, typer.Option("--print", help="Print the file and install nothing.")] = False,
    force: Force = False,
) -> None:
    """Write the service's file, start the server now, and start it at every login."""
    with _failing():
        manager = find_manager()
        environ = environment()
        if config is None and environ.get(FILE_VARIABLE):
            config = Path(environ[FILE_VARIABLE])
        text = manager.text_of(definition_of(model=model, config=config, http_port=http_port))
        if shows_only:
            typer.echo(text, nl=False)
            return
        if left_out := left_out_variables(environ):
            err.print(
                f"not passed to the service, write them to the --config file: {', '.join(left_out)}",
                markup=False,
            )
        # Ask first: if no manager answers, nothing is written.
        manager.status()
        file = DefinitionFile(manager.path)
        was_there = file.state(text) is ServiceFileState.SAME
        file.write(text, is_forced=force)
        manager.start()
        done = "unchanged" if was_there else "written"
        out.print(f"{done}: {file.path}; {manager.name} starts it", markup=False)
        for hint in ("its status: icehouse service status", *manager.hints):
            err.print(hint, markup=False)


@app.command()
def uninstall(force: Force = False) -> None:
    """Stop the server cleanly and remove the service's file. Models and blocks stay."""
    with _failing():
        manager = find_manager()
        file = DefinitionFile(manager.path)
        file.guard_removal(is_forced=force)
        # Long enough for any settings; the manager ends it much earlier by its own limit.
        manager.stop(timeout_s=3600)
        file.path.unlink(missing_ok=True)
        manager.forget()
        out.print(f"removed: {file.path}", markup=False)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show whether the service is installed and running; exit code 0 if it is running."""
    with _failing():
        manager = find_manager()
        state = DefinitionFile(manager.path).state()
        is_installed = state is not ServiceFileState.ABSENT
        service = manager.status() if is_installed else None
    is_running = service is not None and service.is_running
    facts = {} if service is None else service.facts
    is_changed = state is ServiceFileState.CHANGED
    if as_json:
        print_json(
            {
                "installed": is_installed,
                "changed": is_changed,
                "running": is_running,
                "file": manager.path,
                "facts": facts,
            }
        )
    elif not is_installed:
        out.print(f"not installed: {manager.path} does not exist", markup=False)
    else:
        out.print(f"{manager.path}{', changed by hand' if is_changed else ''}", markup=False)
        for name, value in facts.items():
            out.print(f"{name}: {value}", markup=False)
    if not is_running:
        raise typer.Exit(EXIT_FAILURE)


def find_manager() -> Systemd | Launchd:
    """Return this system's service manager; raises ServiceError if it has none that we know."""
    if sys.platform == "darwin":
        return Launchd(Path.home())
    if sys.platform == "linux":
        given = Path(environment().get("XDG_CONFIG_HOME") or "")
        return Systemd(given if given.is_absolute() else Path.home() / ".config")
    raise ServiceError(
        f"no supported service manager on {sys.platform}; there are systemd (Linux) and launchd (macOS)"
    )


def definition_of(
    *, model: str | None, config: Path | None, http_port: str | None = None
) -> ServiceDefinition:
    """Return what is to be run. Raises ConfigError for settings that the server would refuse.

    Paths are made absolute: a service has another working folder.
    """
    # Imported here, so that commands start without tokenizers.
    from icehouse_server.demo.models import DEMO_MODELS

    file = None if config is None else expanded(config).absolute()
    # Without this terminal's variables, as the service will see it.
    flags = {"model.model": model, "http.port": http_port}
    loaded = load_config(flags=flags, environ={}, file=file)
    words = [*_program(), "serve"]
    if model is not None:
        folder = expanded(model)
        words.append(str(folder.absolute()) if model not in DEMO_MODELS and folder.is_dir() else model)
    if file is not None:
        words += ["--config", str(file)]
    if http_port is not None:
        words += ["--http-port", http_port]
    has_format = loaded.sources["log.format"] != "default"
    return ServiceDefinition(
        command=tuple(words),
        environment={} if has_format else {"ICEHOUSE_LOG_FORMAT": "json"},
        stop_timeout_s=math.ceil(stop_bound_s(loaded.config)) + _STOP_MARGIN_S,
    )


def left_out_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that `serve` would take from this terminal."""
    passed_over = {FILE_VARIABLE, *CLIENT_VARIABLES}
    return sorted(name for name in environ if name.startswith(_LEFT_OUT_PREFIXES) and name not in passed_over)


def _program() -> list[str]:
    """Return the command of this installation."""
    script = Path(sys.executable).absolute().with_name("icehouse")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "icehouse_server.cli.main"]


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turn failures into one line and exit code 1."""
    try:
        yield
    except (ServiceError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        complain(said)
        raise typer.Exit(EXIT_FAILURE) from error
