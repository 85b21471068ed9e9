"""`icehouse-client`: the commands that ask a server, by themselves."""

from __future__ import annotations

import typer

from icehouse_client.cli import console, prefix_cache, server, texts
from icehouse_client.cli.chat import chat
from icehouse_client.cli.generate import generate
from icehouse_client.cli.top import top

_COMMANDS = (
    *(generate, chat, server.models, prefix_cache.explain, prefix_cache.warm, prefix_cache.pin),
    *(prefix_cache.unpin, prefix_cache.evict, server.stats, server.info, server.requests, server.cancel),
    *(texts.tokenize, texts.detokenize, texts.embed, top, server.health),
)

app = typer.Typer(
    name="icehouse-client",
    help="Ask a server of Icehouse: generate, chat, look into its prefix cache and at what it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in _COMMANDS:
    app.command()(command)


def main() -> None:
    """Run the command line."""
    console.run(app)
