"""`icehouse chat`: talk with a served model, on a terminal or through a pipe, each turn from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.client.answer_options import answer_options_of
from icehouse_server.cli.client.prompt_options import read_conversation
from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson
from icehouse_server.cli.terminal.option_groups import with_groups

if TYPE_CHECKING:
    from icehouse_client import Options


@with_groups(target=target_of, answer=answer_options_of)
def chat(
    target: Target,
    answer: Options,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    load: Annotated[Path | None, typer.Option(help="Go on with a saved conversation.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the conversation here after each turn.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(help="Whether a model that can think first does; by default as its template says."),
    ] = None,
    model: Annotated[str, typer.Option(help="Refuse unless it is served.", show_default=False)] = "",
    adapter: Annotated[str, typer.Option(help="One of the model's LoRA adapters.", show_default=False)] = "",
    tenant: Annotated[
        str, typer.Option(help="Whose conversation it is, for operators.", show_default=False)
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answers only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Talk with a model. Each line is a turn, also from a pipe; triple quotes hold several; /help lists more.

    Below each answer stands how many of its prompt's tokens came from the cache.
    """
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_client import Conversation

    from icehouse_server.cli.client.chat.session import Server, converse
    from icehouse_server.cli.client.connection import connected

    talk = Conversation() if load is None else read_conversation(load)
    talk.system = system or talk.system
    options: Options = {**answer, "model": model, "adapter": adapter}
    if tenant:
        options["tenant"] = tenant
    if thinking is not None:
        options["template_arguments"] = {"enable_thinking": thinking}
    with connected(target) as client:
        server = Server(client, target.address, options)
        converse(server, talk, is_json=as_json, is_quiet=quiet, save_to=save)
