"""Prefix cache of a running server: `icehouse explain`, `warm`, `pin`, `evict`, `export`, `import`, more."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from icehouse.v1.cache_service_pb2 import (
    ExplainResponse,
    ImportRefusal,
    ImportResponse,
    PinResponse,
    UnpinResponse,
)
from rich.progress import DownloadColumn, MofNCompleteColumn
from rich.text import Text

from icehouse_client.archive_files import ArchiveFile
from icehouse_client.cache_client import ImportOptions, PinOptions
from icehouse_client.cli.connection import Server, server_of
from icehouse_client.cli.console import (
    EXIT_FAILURE,
    AsJson,
    UsageError,
    bar,
    confirm,
    err,
    expanded,
    harmless,
    out,
    print_json,
    printable,
    show,
)
from icehouse_client.cli.figures import duration_text, size_text
from icehouse_client.cli.generate import cost_text
from icehouse_client.cli.option_groups import with_groups
from icehouse_client.cli.prompt import GivenPrompt, Model, Suffix, prompt_of
from icehouse_client.results import reuse_limit_name, seconds, usage_from

_MOST_DIGITS = 6
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_WIDTH_LIMIT = 72
_RAM, _SSD, _COMPUTE = "█", "▓", "░"
_STYLES = {_RAM: "green", _SSD: "cyan", _COMPUTE: "yellow"}

LIMITS = {
    "NONE": "",
    "NO_MATCH": "no cached prompt begins like this one",
    "DIVERGED": "no cached prompt continues like this one after the reused tokens",
    "NO_CHECKPOINT": "more of it is cached, but this model can continue only at a checkpoint",
    "RECOMPUTE_FASTER": "more of it is on SSD, but computing it is predicted to be faster than loading it",
    "LOAD_FAILED": "a block on SSD was missing or damaged, and was dropped",
    "SWITCHED_OFF": "the server does not use its cache",
    "UNSUPPORTED": "this model's cache cannot be split into blocks",
    "PROMPT_LOGPROBS": "the prompt's log probabilities were requested, so all of it is computed",
}
"""Why no more is reused, by the API's word."""

REFUSALS = {
    "DAMAGED": "its content does not match its name",
    "LAYOUT": "tensors of another model, or states that cannot be split",
    "SCOPE": "of another tenant, or of an adapter that is not served",
    "PARENT_MISSING": "the block before it is missing",
    "QUOTA": "no space within the tenant's quota",
    "SSD_FULL": "no space on SSD",
}
"""Why a block of an archive was not adopted, by the API's word."""
_PIPE = "-"

_about_a_prompt = with_groups(server=server_of, prompt=prompt_of)


@_about_a_prompt
def explain(prompt: GivenPrompt, server: Server, suffix: Suffix = None, as_json: AsJson = False) -> None:
    """Show how much of a prompt the server would reuse, why not more, and when the first token would come."""
    found = server.client.cache.explain(prompt.read(suffix), **prompt.options)
    show(found, explanation(found, width=out.width), as_json=as_json)


@_about_a_prompt
def warm(prompt: GivenPrompt, server: Server, suffix: Suffix = None, as_json: AsJson = False) -> None:
    """Bring a prompt into the RAM tier, from SSD or by computing it, without generating."""
    asked = prompt.read(suffix)
    with bar("computing the prompt", MofNCompleteColumn()) as advance:
        done = server.client.cache.warm(
            asked,
            on_progress=lambda now: advance(now.processed_tokens, now.prompt_tokens),
            **prompt.options,
        )
    show(done, cost_text(usage_from(done.usage), "warm"), as_json=as_json)


@_about_a_prompt
def pin(
    prompt: GivenPrompt,
    server: Server,
    suffix: Suffix = None,
    ttl: Annotated[
        str | None, typer.Option(help="Duration such as 30s, 5m, 1h or 7d; by default until unpin.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Protect a prompt's cached blocks from eviction by policy; pinning again extends it."""
    options = cast(PinOptions, {**prompt.options})
    if ttl is not None:
        options["ttl_s"] = ttl_of(ttl)
    done = server.client.cache.pin(prompt.read(suffix), **options)
    show(done, f"pinned: {_blocks(done)}", as_json=as_json)


@_about_a_prompt
def unpin(prompt: GivenPrompt, server: Server, suffix: Suffix = None, as_json: AsJson = False) -> None:
    """Unpin a prompt's blocks."""
    done = server.client.cache.unpin(prompt.read(suffix), **prompt.options)
    show(done, f"unpinned: {_blocks(done)}", as_json=as_json)


@with_groups(server=server_of)
def end_session(
    server: Server,
    session: Annotated[str, typer.Argument(help="The session's name in its requests.")],
    tenant: Annotated[str, typer.Option(help="Tenant to act for; operators only.")] = "",
    as_json: AsJson = False,
) -> None:
    """End a conversation: the blocks that only it used are evicted first."""
    done = server.client.cache.end_session(session, tenant=tenant)
    told = (
        f"evicted first from now on: {done.block_count:,} blocks, "
        f"{size_text(done.ram_bytes)} in RAM, {size_text(done.ssd_bytes)} on SSD"
    )
    show(done, told, as_json=as_json)


@_about_a_prompt
def evict(
    prompt: GivenPrompt,
    server: Server,
    suffix: Suffix = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything, of every tenant; operators only.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation of --all.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a prompt's cached blocks from RAM and SSD, including pinned ones."""
    if everything and (prompt.prompt, suffix) != (None, None):
        raise typer.BadParameter("--all removes everything; leave it out to remove one prompt")
    if everything and not yes:
        confirm(f"Remove everything that {server.address} has cached?")
    asked = None if everything else prompt.read(suffix)
    cache = server.client.cache
    order = cache.evict_all if asked is None else functools.partial(cache.evict, asked, **prompt.options)
    with bar("removing blocks", MofNCompleteColumn()) as advance:
        done = order(on_progress=lambda now: advance(now.processed_block_count, now.block_count))
    told = (
        f"removed: {done.ram_block_count:,} blocks from RAM ({size_text(done.ram_bytes)}), "
        f"{done.ssd_block_count:,} from SSD ({size_text(done.ssd_bytes)})"
    )
    show(done, told, as_json=as_json)


@_about_a_prompt
def export_blocks(
    prompt: GivenPrompt,
    server: Server,
    to: Annotated[Path, typer.Option("--to", help="The archive to write; - is standard output.")],
    suffix: Suffix = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the tenant.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a prompt's cached blocks to an archive, which holds the prompt's tokens."""
    if everything and (prompt.prompt, suffix) != (None, None):
        raise typer.BadParameter("--all exports everything; leave it out to export one prompt")
    asked = None if everything else prompt.read(suffix)
    is_pipe = str(to) == _PIPE
    file: ArchiveFile = sys.stdout.buffer if is_pipe else expanded(to)
    with bar("exporting blocks", DownloadColumn()) as advance:
        try:
            done = server.client.cache.export_archive(file, asked, on_progress=advance, **prompt.options)
        except OSError as error:
            raise UsageError(f"{to} cannot be written: {error.strerror}") from error
    told = f"exported: {done.block_count:,} blocks, {size_text(done.size_bytes)}"
    if done.left_out_block_count:
        told += f"; {done.left_out_block_count:,} could not be read and were left out"
    if is_pipe:
        # Standard output is the archive.
        err.print(told, markup=False)
    else:
        show(done, told, as_json=as_json)


@with_groups(server=server_of)
def import_blocks(
    archive: Annotated[str, typer.Argument(help="The archive to read; - is standard input.")],
    server: Server,
    model: Model = "",
    tenant: Annotated[str, typer.Option(help="Tenant that gets the blocks; operators only.")] = "",
    as_json: AsJson = False,
) -> None:
    """Import an archive's blocks into a server; exit code 1 if some were not."""
    file: ArchiveFile = sys.stdin.buffer if archive == _PIPE else expanded(archive)
    options = ImportOptions(model=model, tenant=tenant)
    with bar("importing blocks", DownloadColumn()) as advance:
        try:
            done = server.client.cache.import_archive(file, on_progress=advance, **options)
        except OSError as error:
            raise UsageError(f"{archive} cannot be read: {error.strerror}") from error
    if as_json:
        print_json(done)
    else:
        out.print(_adopted(done), markup=False)
    if done.stop_detail:
        err.print(harmless(f"the rest of the archive was not read: {done.stop_detail}"), markup=False)
    if done.stop_detail or done.refusals:
        raise typer.Exit(EXIT_FAILURE)


def _adopted(done: ImportResponse) -> str:
    parts = [
        f"adopted: {done.adopted_block_count:,} blocks, {size_text(done.adopted_bytes)}",
        f"{done.known_block_count:,} already cached",
    ]
    for each in done.refusals:
        name = ImportRefusal.Name(each.reason).removeprefix("IMPORT_REFUSAL_")
        parts.append(f"{each.block_count:,} refused ({REFUSALS.get(name, name.replace('_', ' ').lower())})")
    return ", ".join(parts)


def ttl_of(text: str) -> float:
    """Return the seconds of a time such as 5m; raises BadParameter for what is none."""
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS
    if unit not in _UNITS_S or not is_number:
        raise typer.BadParameter(f"{text!r} is not a duration; write 30s, 5m, 1h or 7d")
    return float(int(number) * _UNITS_S[unit])


def _blocks(done: PinResponse | UnpinResponse) -> str:
    return f"{done.block_count:,} blocks with {done.token_count:,} tokens, {size_text(done.size_bytes)}"


def explanation(found: ExplainResponse, *, width: int) -> Text:
    """Return a bar of where a prompt's tokens come from, then the time, and why not more is reused."""
    report = found.cache
    compute = found.prompt_tokens - report.cached_tokens
    parts = [(_RAM, report.ram_tokens, "from RAM"), (_SSD, report.ssd_tokens, "from SSD")]
    parts.append((_COMPUTE, compute, "to compute"))
    text = parts_bar([(mark, count) for mark, count, _ in parts], width=min(width, _WIDTH_LIMIT))
    text.append(f"\n{found.prompt_tokens:,} tokens: ")
    for index, (mark, count, what) in enumerate(parts):
        text.append("   " if index else "")
        text.append(mark, style=_STYLES[mark])
        text.append(f" {count:,} {what}")
    if found.HasField("predicted_time_to_first_token"):
        soon = seconds(found.predicted_time_to_first_token)
        text.append(f"\nfirst token in about {duration_text(soon)}")
        if found.HasField("predicted_time_to_first_token_cold"):
            cold = seconds(found.predicted_time_to_first_token_cold)
            text.append(f", without the cache {duration_text(cold)}")
    else:
        text.append("\nno prediction yet: this server has not measured a prompt")
    limit = reuse_limit_name(report)
    if why := LIMITS.get(limit, limit.replace("_", " ").lower()):
        text.append(f"\nwhy not more: {why}")
    if report.HasField("divergence"):
        place = report.divergence
        text.append(
            f"\nthe nearest cached prompt differs at token {place.token_index:,}: "
            f"{printable(place.prompt_token.text)!r} here, {printable(place.cached_token.text)!r} there"
        )
    pinned = sum(block.token_count for block in found.blocks if block.pinned)
    if pinned:
        text.append(f"\n{pinned:,} of its tokens are pinned")
    return text


def parts_bar(parts: list[tuple[str, int]], *, width: int) -> Text:
    """Return a bar of so many columns; what is there at all has one at least."""
    total = sum(count for _, count in parts)
    columns = {mark: max(1, round(count * width / total)) for mark, count in parts if count}
    if columns:
        # What rounding gave too much or too little is the longest part's.
        columns[max(columns, key=columns.__getitem__)] += width - sum(columns.values())
    return Text.assemble(*((mark * count, _STYLES[mark]) for mark, count in columns.items()))
