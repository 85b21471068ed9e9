"""Model commands: `icehouse pull`, `ls` and `rm` for the models on this machine."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from icehouse_client.cli.console import AsJson, confirm, err, out, print_json, show, table
from icehouse_client.cli.figures import age_text, size_text
from rich.text import Text

from icehouse_server.cli.terminal.build_progress import build_progress
from icehouse_server.clock import SystemClock

if TYPE_CHECKING:
    from icehouse_server.bootstrap.kept_models import KeptModel

_PULL_HELP = "Id on the hub, such as mlx-community/Qwen3-0.6B-4bit, or a demo model: demo, demo-gemma."


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help=_PULL_HELP, show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Download a model before the first `serve`: from the hub into its cache, or a demo model."""
    # Imported here, as below: it imports libraries that most commands do not need.
    from icehouse_server.bootstrap import kept_models

    with build_progress() as on_progress:
        found = kept_models.pull(model, on_progress=on_progress)
    shown = f"{found.name}: {size_text(found.size_bytes)} in {found.folder}"
    show(_facts_of(found), shown, as_json=as_json)


def ls(as_json: AsJson = False) -> None:
    """List the models on this machine: demo models and the hub's cache, with size and last read."""
    from icehouse_server.bootstrap import kept_models

    found = kept_models.kept_models()
    if as_json:
        print_json({"models": [_facts_of(model) for model in found]})
        return
    if not found:
        err.print("no models on this machine; `icehouse pull` downloads one")
        return
    now = SystemClock().wall()
    shown = table("model", "size", "last read", "", figures=("size", "last read"))
    for model in found:
        age = age_text(now - model.read_time)
        shown.add_row(Text(model.name), size_text(model.size_bytes), age, "in use" if model.is_in_use else "")
    out.print(shown)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Models as `icehouse ls` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove models from this machine, after asking. A model that a server here uses is kept."""
    from icehouse_server.bootstrap import kept_models

    found = [kept_models.find(name) for name in dict.fromkeys(names)]
    if not yes:
        what = ", ".join(f"{model.name} ({size_text(model.size_bytes)})" for model in found)
        confirm(f"Remove {what} from this machine?")
    for model in found:
        # Check again: a server may have started using it while the user thought about the question.
        kept_models.remove(kept_models.find(model.name))
        if not as_json:
            out.print(f"removed {model.name}, {size_text(model.size_bytes)}", markup=False)
    if as_json:
        print_json({"removed": [_facts_of(model) for model in found]})


def _facts_of(model: KeptModel) -> dict[str, Any]:
    read = datetime.datetime.fromtimestamp(model.read_time, datetime.UTC)
    return {**dataclasses.asdict(model), "read_time": read.isoformat(timespec="seconds")}
