"""Console of every command: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""As shells have it for what Ctrl-C ended."""

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that move the cursor, change colours or turn the direction of what is there."""
_KEPT = frozenset("\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}")
"""Of those, what lines, Persian words and families of emoji are made with."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class UsageError(Exception):
    """What a command was given is of no use: a file, an address. Its text says what to do instead."""


def run(app: Callable[[], object]) -> None:
    """Run a command line: whatever the terminal's encoding, and with one line for a UsageError."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding shows a question mark for what it lacks; nothing may end by that.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Whatever the locale: what is no UTF-8 is told where the text is sent.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        app()
    except UsageError as error:
        complain(str(error))
        sys.exit(EXIT_USAGE)


def facts_of(message: Message) -> dict[str, Any]:
    """Return a message as JSON has it: what is absent is left out, what is zero is not.

    Protobuf's own mapping, with the protos' names: 64-bit numbers are strings and durations such as "1.5s",
    as grpcurl and gateways show them.
    """
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value for programs, messages in it by `facts_of`: on standard output, not styled or wrapped."""
    typer.echo(
        json.dumps(value, indent=indent, default=lambda v: facts_of(v) if isinstance(v, Message) else str(v))
    )


def show(answer: object, shown: RenderableType, *, as_json: bool) -> None:
    """Print an answer for programs, or as it is shown to people."""
    if as_json:
        print_json(answer)
    else:
        out.print(shown, markup=False)


def harmless(text: str) -> str:
    """Return somebody else's text without anything that a terminal obeys, but for new lines and tabs."""
    return "".join(
        char if char in _KEPT or unicodedata.category(char) not in _OBEYED else _REPLACEMENT for char in text
    )


def printable(text: str) -> str:
    """Return a caller's own text, for one line, without anything that a terminal obeys."""
    return "".join(char if char.isprintable() else "?" for char in text)


def print_text(text: str, *, end: str = "") -> None:
    """Print a model's text at once, as it is or, on a terminal, without what that would obey."""
    print(harmless(text) if sys.stdout.isatty() else text, end=end, flush=True)


def expanded(path: str | Path) -> Path:
    """Return a path with a home folder in the place of `~`; that of nobody stays, and leads to no file."""
    return Path(os.path.expanduser(path))


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
        raise typer.BadParameter("nobody answered; pass --yes where there is no terminal") from None
    if not is_sure:
        raise typer.Abort


@contextlib.contextmanager
def bar(what: str, shown: ProgressColumn, *, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error while something long runs; yields what is told of done and of all."""
    columns = (TextColumn("{task.description}"), BarColumn(), shown, TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, total=total: progress.update(task, completed=done, total=total)


def facts_table(
    *rows: tuple[str, RenderableType], style: str = "dim", justify: JustifyMethod = "left"
) -> Table:
    """Return a line for each fact, its name, dimmed unless another style is named, before it."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=style, justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def table(*names: str, figures: Container[str] = (), space: int = 2) -> Table:
    """Return a table without rows yet; the columns of figures are aligned to the right."""
    made = Table(box=None, padding=(0, space, 0, 0), header_style="dim")
    for name in names:
        made.add_column(name, no_wrap=True, justify="right" if name in figures else "left")
    return made
