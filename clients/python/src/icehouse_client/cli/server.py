"""Facts about a running server: `icehouse models`, `ps`, `info`, `stats`, `requests`, `health`; `cancel`."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from icehouse.v1.model_service_pb2 import LoadingModel, Model
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from icehouse_client.cli.connection import Server, failure_text, server_of
from icehouse_client.cli.console import (
    EXIT_FAILURE,
    AsJson,
    UsageError,
    complain,
    err,
    facts_of,
    facts_table,
    printable,
    show,
    table,
)
from icehouse_client.cli.figures import age_text, size_text
from icehouse_client.cli.generate import loading_text
from icehouse_client.cli.option_groups import timeout, with_groups
from icehouse_client.cli.top import rates_between, screen
from icehouse_client.errors import IcehouseClientError
from icehouse_client.results import seconds

Result = TypeVar("Result")

_asks_a_server = with_groups(server=server_of)


class ModelsAction(enum.StrEnum):
    """What is to become of models."""

    LS = "ls"
    PULL = "pull"
    LOAD = "load"
    UNLOAD = "unload"


@_asks_a_server
def models(
    server: Server,
    action: Annotated[
        ModelsAction, typer.Argument(metavar="[ACTION]", help="ls, pull, load or unload.")
    ] = ModelsAction.LS,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a server's models (adapters, context, KV per token); download, load or unload them."""
    served = server.client.models()
    wanted = names or [model.id for model in served]
    if action is ModelsAction.LS:
        by_name = {name: model for model in served for name in (model.id, *model.aliases)}
        if unknown := [name for name in wanted if name not in by_name]:
            raise UsageError(f"model {unknown[0]!r} is not served here; use one of: {', '.join(by_name)}")
        served = [model for model in served if {model.id, *model.aliases} & {*wanted}]
        show({"models": served}, Group(*map(_model_table, served)), as_json=as_json)
        return
    is_fetched, is_unloaded = action is ModelsAction.PULL, action is ModelsAction.UNLOAD
    with contextlib.ExitStack() as stack:
        status = None
        if err.is_terminal and not is_unloaded:
            status = stack.enter_context(err.status("fetching" if is_fetched else "loading"))

        def tell(loading: LoadingModel) -> None:
            if status is not None:
                status.update(loading_text(loading))

        def done(name: str) -> Model:
            if is_unloaded:
                return server.client.unload_model(name)
            return server.client.load_model(name, fetch_only=is_fetched, on_progress=tell)

        found = _of_each(wanted, done, address=server.address)
    _show_each("models", found, lambda models: Group(*map(_model_table, models)), as_json=as_json)


@_asks_a_server
def ps(server: Server, as_json: AsJson = False) -> None:
    """List a server's models and which are loaded."""
    served = server.client.models()
    shown = table("model", "state", "size", "", figures=("size",))
    for model in served:
        size = size_text(model.weight_bytes) if model.weight_bytes else ""
        detail = model.state_detail or ", ".join(model.aliases)
        shown.add_row(Text(model.id), _state(model), size, Text(printable(detail)))
    show({"models": served}, shown, as_json=as_json)


@_asks_a_server
def stats(server: Server, as_json: AsJson = False) -> None:
    """Print a server's counters once: requests, tokens, tiers, tenants; `top` shows them live."""
    found = server.client.stats()
    shown = screen(found, rates_between(None, found), address=server.address)
    show(found, shown, as_json=as_json)


@_asks_a_server
def info(server: Server, as_json: AsJson = False) -> None:
    """Show a server's version, state, features and limits for requests."""
    found = server.client.server()
    facts = facts_of(found)
    features = [_words(name, "SERVER_FEATURE_") for name in facts["features"]]
    shown = facts_table(
        ("version", found.version),
        ("state", _words(facts["state"], "SERVER_STATE_")),
        ("up", age_text(seconds(found.uptime))),
        ("features", ", ".join(features) or "none"),
        *((name, f"{int(limit):,}") for name, limit in facts["limits"].items()),
    )
    show(facts, shown, as_json=as_json)


@_asks_a_server
def requests(server: Server, as_json: AsJson = False) -> None:
    """List waiting and running requests, the oldest first: your own, or everybody's for operators."""
    found = server.client.requests()
    if not (found or as_json):
        err.print("no requests waiting or running")
        return
    figures = ("age", "prompt", "cached", "output")
    shown = table("request", "method", "tenant", "phase", *figures, figures=figures)
    for each in found:
        shown.add_row(
            Text(each.request_id),
            each.method.rpartition("/")[2],
            Text(printable(each.tenant)),
            _words(facts_of(each)["phase"], "REQUEST_PHASE_"),
            age_text(seconds(each.age)),
            f"{each.prompt_tokens:,}",
            f"{each.cached_tokens:,}",
            f"{each.output_tokens:,} of {each.max_output_tokens * each.part_count:,}",
        )
    show({"requests": found}, shown, as_json=as_json)


@_asks_a_server
def cancel(
    server: Server,
    request_ids: Annotated[
        list[str], typer.Argument(help="Ids of requests to end, as `requests` shows them.")
    ],
    as_json: AsJson = False,
) -> None:
    """End requests within a step: your own, or anybody's for operators."""
    found = _of_each(request_ids, server.client.cancel, address=server.address)
    _show_each(
        "requests",
        found,
        lambda ended: "\n".join(f"ended {each.request_id}" for each in ended),
        as_json=as_json,
    )


@_asks_a_server
def health(
    server: Server,
    timeout_s: Annotated[float, timeout()] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check whether a server accepts requests; exit code 0 if it does."""
    status = server.client.health(timeout_s=timeout_s)
    show({"status": status}, status, as_json=as_json)
    if status != "SERVING":
        raise typer.Exit(EXIT_FAILURE)


def _of_each(names: list[str], ask: Callable[[str], Result], *, address: str) -> list[Result | None]:
    """Return what came of each; None for one that failed, whose reason is printed."""
    found: list[Result | None] = []
    for name in names:
        try:
            found.append(ask(name))
        except IcehouseClientError as error:
            complain(failure_text(error, address))
            found.append(None)
    return found


def _show_each(
    what: str,
    found: list[Result | None],
    shown: Callable[[list[Result]], RenderableType],
    *,
    as_json: bool,
) -> None:
    """Print what came of those that did not fail; ends the command as failed where one did."""
    done = [each for each in found if each is not None]
    if done or as_json:
        show({what: done}, shown(done), as_json=as_json)
    if len(done) < len(found):
        raise typer.Exit(EXIT_FAILURE)


def _state(model: Model) -> str:
    """Return a model's state; a server of before told nothing of it."""
    return _words(facts_of(model)["state"], "MODEL_STATE_") if model.state else "ready"


def _model_table(model: Model) -> Table:
    if not model.architecture:
        # It was never loaded.
        return facts_table(("model", model.id), ("state", f"{_state(model)} {model.state_detail}".strip()))
    told = model.reply_format
    calls = f"calls as {told.calls}" if told.calls else "no calls"
    reasoning = f"reasoning from {told.reasoning_start}" if told.reasoning_start else "no reasoning"
    images = "yes, each in one pass" if model.runs_images_whole else "yes"
    kv = size_text(model.kv_bytes_per_token) if model.kv_bytes_per_token else "not known"
    return facts_table(
        ("model", model.id),
        *((("state", _state(model)),) if _state(model) != "ready" else ()),
        ("made for", facts_of(model)["kind"].removeprefix("MODEL_KIND_").lower()),
        ("kind", f"{model.architecture}, {model.dtype}, quantization {model.quantization}"),
        (
            "size",
            f"{model.parameter_count:,} weights, {size_text(model.weight_bytes)}, on the {model.device}",
        ),
        ("context", f"{model.context_tokens:,} tokens"),
        ("KV", f"{kv} a token"),
        ("chats", "yes" if model.has_chat_template else "no: it has no chat template"),
        ("replies", f"{calls}, {reasoning}"),
        ("images", images if model.reads_images else "no"),
        ("passes", _passes(model)),
        ("embeds", f"{model.embedding_dimensions:,} dimensions" if model.embedding_dimensions else "no"),
        ("adapters", ", ".join(adapter.name for adapter in model.adapters) or "none"),
        ("cache", model.fingerprint[:8] or "none"),
    )


def _passes(model: Model) -> str:
    """Return what sequences share of a pass; a server of before told nothing of it."""
    splits = [_words(split, "PASS_SPLIT_") for split in facts_of(model)["pass_splits"]]
    if splits == ["alone"]:
        return "one per sequence"
    return f"shared, split at {' and '.join(splits)}" if splits else "not known"


def _words(name: object, prefix: str) -> str:
    """Return an enum's value in words; a number where a newer server has one that is not known here."""
    return str(name).removeprefix(prefix).replace("_", " ").lower()
