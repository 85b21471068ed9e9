"""`icehouse generate`: ask a running server for a continuation and print it as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from icehouse_server.cli.terminal import client_options
from icehouse_server.cli.terminal.console import complain, err

if TYPE_CHECKING:
    from icehouse_server.rpc.client.generate import Summary


def generate(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: client_options.Address = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's turn of a chat.")] = False,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; by default the server's choice.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    adapter: Annotated[
        str, typer.Option(help="One of the server's LoRA adapters; by default the model by itself.")
    ] = "",
    timeout_s: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the text only.")] = False,
    token: client_options.Token = None,
    tls: client_options.Tls = False,
    ca: client_options.Ca = None,
    certificate: client_options.Certificate = None,
    key: client_options.Key = None,
) -> None:
    """Stream a continuation of TEXT from a running server."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.rpc.client.generate import CallFailed, Connection, Prompt

    prompt = Prompt(
        text=sys.stdin.read() if text == "-" else text,
        is_chat=chat,
        max_output_tokens=max_output_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        adapter=adapter,
    )
    access = client_options.access_of(token=token, tls=tls, ca=ca, certificate=certificate, key=key)
    with Connection(client_options.resolved(address), access) as connection:
        try:
            summary = connection.stream(prompt, on_text=print_text, timeout_s=timeout_s)
        except CallFailed as error:
            complain(str(error))
            raise typer.Exit(1) from error
    print(flush=True)
    if not quiet:
        err.print(f"[dim]{summary_text(summary)}[/]")


def print_text(text: str) -> None:
    """Print a piece of generated text at once."""
    print(text, end="", flush=True)


def summary_text(summary: Summary) -> str:
    """Return a call's cost in one line."""
    reused = summary.ram_token_count + summary.ssd_token_count
    where = f" ({summary.ram_token_count} from RAM, {summary.ssd_token_count} from SSD)" if reused else ""
    return (
        f"{summary.prompt_token_count} prompt tokens, {reused} reused{where} · "
        f"first token after {summary.ttft_s * 1000:.0f} ms · "
        f"{summary.output_token_count} tokens at {summary.decode_tokens_per_s:.1f}/s · "
        f"{summary.finish_reason.replace('_', ' ')}"
    )
