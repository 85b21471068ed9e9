"""`icehouse-client`: the commands that ask a server, by themselves. What each command line of ours is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from icehouse_client.cli import console, prefix_cache, server, texts
from icehouse_client.cli.chat import chat
from icehouse_client.cli.generate import generate
from icehouse_client.cli.top import top

ASK = "Ask"
CACHE = "Cache"
MODELS = "Models"
MANAGE = "Manage"
"""Groups of commands in the help."""

_TYPES = {
    "bool": "",
    "str": "TEXT",
    "path": "PATH",
    "Path": "PATH",
    "int": "N",
    "int range": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
}
"""What the help calls the types that the library of the command line shows by Python's names."""


class PlainCommand(TyperCommand):
    """A command whose help shows what is to be typed, and not how Python calls its type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(parameter) for parameter in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """A group of commands, whose own help shows the same."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(parameter) for parameter in super().get_params(ctx)]


class CommandLine(typer.Typer):
    """A command line, or a group of commands in one."""

    def __init__(self, *, help: str | None = None, name: str | None = None) -> None:
        super().__init__(
            name=name,
            cls=PlainGroup,
            help=help,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode="rich",
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Add a command, of `cls` PlainCommand unless another one is named."""
        return super().command(name, **{"cls": PlainCommand, **options})


_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    ASK: (generate, chat, texts.embed, texts.rerank, texts.tokenize, texts.detokenize),
    CACHE: (
        *(prefix_cache.explain, prefix_cache.warm, prefix_cache.pin, prefix_cache.unpin),
        *(prefix_cache.end_session, prefix_cache.evict),
    ),
    MODELS: (server.models, server.ps),
    MANAGE: (top, server.stats, server.info, server.health, server.requests, server.cancel),
}

app = CommandLine(
    name="icehouse-client",
    help="Use an Icehouse server: generate, chat, and inspect its prefix cache and activity.",
)
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
# `import` is no name that Python has for a function.
app.command("export", rich_help_panel=CACHE)(prefix_cache.export_blocks)
app.command("import", rich_help_panel=CACHE)(prefix_cache.import_blocks)


def _plain(parameter: Any) -> Any:
    # In the instance, which goes before the class; only once, however often the help is shown.
    vars(parameter).setdefault(
        "display_type_rich", functools.partial(_shown_type, parameter.display_type_rich)
    )
    return parameter


def _shown_type(display_type: Callable[..., str | None], ctx: Any) -> str | None:
    shown = display_type(ctx=ctx) or ""
    if not shown.startswith("<"):
        return shown
    bare = shown.strip("<>").removeprefix("list[").removesuffix("]")
    return _TYPES.get(bare, bare)


def main() -> None:
    """Run the command line."""
    console.run(app)
