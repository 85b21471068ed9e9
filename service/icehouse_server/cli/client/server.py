"""Facts about a running server: `icehouse models`, `info`, `stats` and `requests`, and `cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from icehouse_server.cli.cache.block_facts import age_text
from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, err, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups
from icehouse_server.cli.top.view import printable
from icehouse_server.config.setting import size_text

if TYPE_CHECKING:
    from icehouse.v1.model_service_pb2 import Model

_FIGURES = ("age", "prompt", "cached", "output")

_asks_a_server = with_groups(target=target_of)


@_asks_a_server
def models(target: Target, as_json: AsJson = False) -> None:
    """Show what a server serves: model, adapters, context, what a token's KV takes."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    with connected(target) as client:
        served = client.models()
    if as_json:
        print_json({"models": [message_facts(model) for model in served]})
        return
    for model in served:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        weights = f"{model.parameter_count:,} weights, {size_text(model.weight_bytes)}"
        kv = size_text(model.kv_bytes_per_token) if model.kv_bytes_per_token else "not known"
        chats = "yes" if model.has_chat_template else "no: it has no chat template"
        for name, value in (
            ("model", model.id),
            ("kind", f"{model.architecture}, {model.dtype}, quantization {model.quantization}"),
            ("size", f"{weights}, on the {model.device}"),
            ("context", f"{model.context_tokens:,} tokens"),
            ("KV", f"{kv} a token"),
            ("chats", chats),
            ("replies", _replies(model)),
            ("images", _images(model)),
            ("passes", _passes(model)),
            ("embeds", f"{model.embedding_dimensions:,} dimensions" if model.embedding_dimensions else "no"),
            ("adapters", ", ".join(adapter.name for adapter in model.adapters) or "none"),
            ("cache", model.fingerprint[:8] or "none is kept"),
        ):
            table.add_row(name, value)
        out.print(table, markup=False)


@_asks_a_server
def stats(target: Target, as_json: AsJson = False) -> None:
    """Print a server's counters once: requests, tokens, tiers, tenants; `top` shows them live."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.cli.top.rates import rates_between
    from icehouse_server.cli.top.view import screen
    from icehouse_server.domain.stats import ServerStats
    from icehouse_server.rpc.messages.message_json import message_facts
    from icehouse_server.rpc.messages.proto_map import from_proto

    with connected(target) as client:
        found = client.cache_stats()
    if as_json:
        print_json(message_facts(found))
        return
    server = from_proto(found, ServerStats)
    out.print(screen(server, rates_between(None, server), address=target.address, history=()))


@_asks_a_server
def info(target: Target, as_json: AsJson = False) -> None:
    """Show a server's version, state, features, and the limits of what requests may ask for."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    with connected(target) as client:
        facts = message_facts(client.server())
    if as_json:
        print_json(facts)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_row("version", facts["version"])
    table.add_row("state", _words(facts["state"], "SERVER_STATE_"))
    table.add_row("up", age_text(0.0, now_time_s=float(facts["uptime"].removesuffix("s"))))
    features = [_words(name, "SERVER_FEATURE_") for name in facts["features"]]
    table.add_row("features", ", ".join(features) or "none")
    for name, limit in facts["limits"].items():
        table.add_row(name, f"{int(limit):,}")
    out.print(table, markup=False)


@_asks_a_server
def requests(target: Target, as_json: AsJson = False) -> None:
    """List the requests that wait or run, the oldest first: your own, or for operators those of all."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    with connected(target) as client:
        found = [message_facts(request) for request in client.requests()]
    if as_json:
        print_json({"requests": found})
        return
    if not found:
        err.print("nothing waits or runs")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("request", "method", "tenant", "phase", "age", "prompt", "cached", "output"):
        table.add_column(name, no_wrap=True, justify="right" if name in _FIGURES else "left")
    for request in found:
        table.add_row(
            Text(request["request_id"]),
            request["method"].rpartition("/")[2],
            Text(printable(request["tenant"])),
            _words(request["phase"], "REQUEST_PHASE_"),
            age_text(0.0, now_time_s=float(request["age"].removesuffix("s"))),
            f"{request['prompt_tokens']:,}",
            f"{request['cached_tokens']:,}",
            f"{request['output_tokens']:,} of {request['max_output_tokens'] * request['part_count']:,}",
        )
    out.print(table)


@_asks_a_server
def cancel(
    target: Target,
    request_ids: Annotated[list[str], typer.Argument(help="Requests to end, as `requests` shows them.")],
    as_json: AsJson = False,
) -> None:
    """End requests within a step: your own, or for operators anybody's."""
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.messages.message_json import message_facts

    ended = []
    with connected(target) as client:
        for request_id in request_ids:
            ended.append(message_facts(client.cancel(request_id)))
            if not as_json:
                out.print(f"ended {request_id}", markup=False)
    if as_json:
        print_json({"requests": ended})


def _replies(model: Model) -> str:
    """What of its replies is told apart."""
    format = model.reply_format
    calls = f"calls as {format.calls}" if format.calls else "no calls"
    return (
        f"{calls}, {f'reasoning from {format.reasoning_start}' if format.reasoning_start else 'no reasoning'}"
    )


def _images(model: Model) -> str:
    if not model.reads_images:
        return "no"
    return "yes, each in one pass" if model.runs_images_whole else "yes"


def _passes(model: Model) -> str:
    """Return what sequences share of a pass; a server of before told nothing of it."""
    from icehouse.v1.model_service_pb2 import PassSplit

    splits = [_words(PassSplit.Name(split), "PASS_SPLIT_") for split in model.pass_splits]
    if splits == ["alone"]:
        return "each sequence its own"
    return f"shared, split at {' and '.join(splits)}" if splits else "not known"


def _words(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).replace("_", " ").lower()
