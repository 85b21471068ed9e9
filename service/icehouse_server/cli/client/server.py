"""Facts about a running server: `icehouse models` and `stats`."""

from __future__ import annotations

from rich.table import Table

from icehouse_server.cli.terminal.client_options import Target, target_of
from icehouse_server.cli.terminal.console import AsJson, out, print_json
from icehouse_server.cli.terminal.option_groups import with_groups
from icehouse_server.config.setting import size_text

_asks_a_server = with_groups(target=target_of)


@_asks_a_server
def models(target: Target, as_json: AsJson = False) -> None:
    """Show what a server serves: model, adapters, context, what a token's KV takes."""
    # Imported here, so that commands that need no gRPC start without it.
    from icehouse_server.cli.client.connection import connected
    from icehouse_server.rpc.client.message_json import message_facts

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
    from icehouse_server.rpc.client.message_json import message_facts
    from icehouse_server.rpc.messages.proto_map import from_proto

    with connected(target) as client:
        found = client.cache_stats()
    if as_json:
        print_json(message_facts(found))
        return
    server = from_proto(found, ServerStats)
    out.print(screen(server, rates_between(None, server), address=target.address, history=()))
