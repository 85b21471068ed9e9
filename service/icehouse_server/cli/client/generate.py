"""`icehouse generate`: ask a running server for a continuation and print it as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.client.answer_options import answer_options_of
from icehouse_server.cli.client.prompt_options import GivenPrompt, Suffix, prompt_of
from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, err, print_json, print_text
from icehouse_server.cli.terminal.option_groups import with_groups

if TYPE_CHECKING:
    from icehouse_client import Options


@with_groups(target=target_of, prompt=prompt_of, answer=answer_options_of)
def generate(
    prompt: GivenPrompt,
    target: Target,
    answer: Options,
    suffix: Suffix = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the text only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stream a continuation of TEXT from a running server."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.cli.client.cost import cost_text, reply_facts

    asked = prompt.read_around(suffix)
    options: Options = {**answer, **prompt.options}
    with connected(target) as client, client.stream(asked, **options) as stream:
        for text in stream:
            if not as_json:
                print_text(text)
        reply = stream.reply
    if as_json:
        print_json(reply_facts(reply))
        return
    print(flush=True)
    if not quiet:
        err.print(cost_text(reply.usage, reply.finish_reason), style="dim", markup=False)
