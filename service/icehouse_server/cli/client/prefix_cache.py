"""Prefix cache of a running server: `icehouse explain`, `warm`, `pin`, `unpin` and `evict`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from icehouse_server.cli.client.prompt_options import GivenPrompt, prompt_of
from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, confirm, err, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups
from icehouse_server.config.setting import size_text

if TYPE_CHECKING:
    from icehouse.v1.cache_service_pb2 import EvictProgress

_about_a_prompt = with_groups(target=target_of, prompt=prompt_of)


@_about_a_prompt
def explain(prompt: GivenPrompt, target: Target, as_json: AsJson = False) -> None:
    """Show what the server would reuse of a prompt, why not more, and how soon the first token would come."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.cli.client.explanation import explanation
    from icehouse_server.rpc.messages.message_json import message_facts

    asked = prompt.read()
    with connected(target) as client:
        found = client.cache.explain(asked, **prompt.options)
    if as_json:
        print_json(message_facts(found))
    else:
        out.print(explanation(found, width=out.width))


@_about_a_prompt
def warm(prompt: GivenPrompt, target: Target, as_json: AsJson = False) -> None:
    """Have the server compute a prompt and keep it, without an answer."""
    from icehouse_client.results import usage_from

    from icehouse_server.cli.client.connection import connected
    from icehouse_server.cli.client.cost import cost_text
    from icehouse_server.rpc.messages.message_json import message_facts

    asked = prompt.read()
    with connected(target) as client, _bar("computing the prompt") as advance:
        done = client.cache.warm(
            asked,
            on_progress=lambda now: advance(now.processed_tokens, now.prompt_tokens),
            **prompt.options,
        )
    if as_json:
        print_json(message_facts(done))
    else:
        out.print(cost_text(usage_from(done.usage), "warm"), markup=False)


@_about_a_prompt
def pin(prompt: GivenPrompt, target: Target, as_json: AsJson = False) -> None:
    """Keep a prompt's cached blocks from being evicted by policy."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    asked = prompt.read()
    with connected(target) as client:
        done = client.cache.pin(asked, **prompt.options)
    if as_json:
        print_json(message_facts(done))
    else:
        out.print(f"pinned: {_blocks(done.block_count, done.token_count, done.size_bytes)}")


@_about_a_prompt
def unpin(prompt: GivenPrompt, target: Target, as_json: AsJson = False) -> None:
    """Take the pins of a prompt's blocks off."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    asked = prompt.read()
    with connected(target) as client:
        done = client.cache.unpin(asked, **prompt.options)
    if as_json:
        print_json(message_facts(done))
    else:
        out.print(f"unpinned: {_blocks(done.block_count, done.token_count, done.size_bytes)}")


@_about_a_prompt
def evict(
    prompt: GivenPrompt,
    target: Target,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything, of every tenant; for operators.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a prompt's cached blocks from RAM and SSD, pinned ones too."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    if everything and prompt.is_given:
        raise typer.BadParameter("--all removes everything; leave it out to remove one prompt")
    if everything and not yes:
        confirm(f"Remove everything that {target.address} has cached?")
    asked = None if everything else prompt.read()
    with connected(target) as client, _bar("removing blocks") as advance:

        def on_progress(now: EvictProgress) -> None:
            advance(now.processed_block_count, now.block_count)

        cache = client.cache
        if asked is None:
            done = cache.evict_all(on_progress=on_progress)
        else:
            done = cache.evict(asked, on_progress=on_progress, **prompt.options)
    if as_json:
        print_json(message_facts(done))
    else:
        out.print(
            f"removed: {done.ram_block_count:,} blocks from RAM ({size_text(done.ram_bytes)}), "
            f"{done.ssd_block_count:,} from SSD ({size_text(done.ssd_bytes)})"
        )


def _blocks(block_count: int, token_count: int, size_bytes: int) -> str:
    return f"{block_count:,} blocks with {token_count:,} tokens, {size_text(size_bytes)}"


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error while something long runs; yields what is told of done and of all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
