"""Console of every command: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from icehouse_server.config import ServerConfig

if TYPE_CHECKING:
    from icehouse_server.demo.build import OnProgress

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

_PHASES = {
    "assemble": "assembling and checking the package's parts",
    "read": "reading the GGUF file",
    "tokenizer": "building the tokenizer",
    "weights": "decoding the weights",
}


def complain(message: str) -> None:
    """Print one line that says what went wrong and what to do."""
    err.print(f"[bold red]icehouse:[/] {escape(message)}")


@contextlib.contextmanager
def build_progress() -> Iterator[OnProgress]:
    """Show the demo model being made: its licence notice once, then a bar per phase.

    Nothing is shown as long as `on_progress` is not called.
    """
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None
        tasks: dict[str, TaskID] = {}

        def on_progress(phase: str, done: float) -> None:
            nonlocal progress
            if progress is None:
                _show_notice()
                progress = stack.enter_context(_progress())
            if phase not in tasks:
                tasks[phase] = progress.add_task(_PHASES.get(phase, phase), total=1.0)
            progress.update(tasks[phase], completed=done)

        yield on_progress


def _progress() -> Progress:
    return Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=err,
    )


def _show_notice() -> None:
    # Imported here: it brings numpy and the tokenizers, and hardly any command makes the model.
    from icehouse_server.demo.build import licence_notice

    err.print("making the demo model, Gemma 3 270M, once; its package says:")
    err.print(f"[dim]{escape(licence_notice())}[/]")


def address_of(config: ServerConfig) -> str:
    """Return where a client on this machine finds the server of this configuration."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"{host}:{config.port}"
