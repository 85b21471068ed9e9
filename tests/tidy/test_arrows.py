"""The arrows between rooms, proved from the syntax trees."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.tree import Module, imports_of, modules

RANKS = {"domain": 0, "telemetry": 1, "kv": 1, "engine": 2, "rpc": 3, "demo": 3, "cli": 4}
"""Imports go to the same or a lower rank."""

FOR_EVERYONE = {"config", "errors", "clock"}

# Who may import what, by full module name or by prefix with a dot at the end.
OWNERS = {
    "mlx": (
        "service.engine.mlx_runner",
        "service.engine.model_loader",
        "service.engine.adapters",  # a module tree for each
        "service.engine.upstream",
        "service.engine.sampler",
        "service.engine.logit_shaping",  # what rows ask of their logits, as arrays
        "service.engine.nucleus",  # what top_p and top_k keep of them
        "service.engine.token_logprobs",
        "service.engine.decode_batch",
        "service.engine.speculative_lane",
        "service.engine.draft_model",
        "service.engine.memory",
        "service.kv.layout",
        "service.kv.layout_",
        "service.kv.ram_tier",
        "service.cli.device",
    ),
    "mlx_lm": ("service.engine.upstream", "service.kv.layout", "service.kv.layout_"),
    "grpc": ("service.rpc.",),
    "grpc_health": ("service.rpc.",),
    "grpc_reflection": ("service.rpc.",),
    "grpc_status": ("service.rpc.",),
    "google": ("service.rpc.",),
    "icehouse": ("service.rpc.",),
    "llguidance": ("service.engine.grammar",),
    "sqlite_utils": ("service.kv.manifest",),
    "sqlite3": ("service.kv.",),
    "cryptography": ("service.kv.vault_aes",),
    "prometheus_client": ("service.telemetry.prometheus",),
    "opentelemetry": ("service.telemetry.spans",),
    "typer": ("service.cli.",),
    "rich": ("service.cli.",),
}

SERVICE = modules("service")


def may_own(owners: tuple[str, ...], name: str) -> bool:
    return any(name == owner or (name.startswith(owner) and owner[-1] in "._") for owner in owners)


def own_name_or_prefix(owners: tuple[str, ...], name: str) -> bool:
    return may_own(owners, name) or any(name.startswith(f"{owner}_") for owner in owners)


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_imports_go_downwards(module: Module) -> None:
    wrong = []
    for line, name in imports_of(module):
        parts = name.split(".")
        if parts[0] != "service" or len(parts) < 2 or parts[1] in FOR_EVERYONE:
            continue
        assert parts[1] in RANKS, f"{module.path}:{line}: {parts[1]} is no room"
        if module.room in FOR_EVERYONE or RANKS[parts[1]] > RANKS.get(module.room, 99):
            wrong.append(f"{module.path}:{line}: {module.room} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_foreign_packages_stay_in_their_rooms(module: Module) -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for line, name in imports_of(module)
        if (owners := OWNERS.get(name.split(".")[0])) and not own_name_or_prefix(owners, module.name)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [m for m in SERVICE if m.room == "kv"], ids=lambda m: m.name)
def test_outside_the_manifest_sqlite_is_an_error_to_catch_and_nothing_else(module: Module) -> None:
    if module.name.startswith("service.kv.manifest"):
        return
    used = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sqlite3"
    }
    assert {name for name in used if not name.endswith("Error") and not name.startswith("SQLITE_")} == set()


def test_nothing_below_tests_or_bench_is_imported_by_the_service() -> None:
    wrong = [
        f"{module.path}:{line}"
        for module in SERVICE
        for line, name in imports_of(module)
        if name.split(".")[0] in ("tests", "bench", "clients")
    ]
    assert wrong == []
