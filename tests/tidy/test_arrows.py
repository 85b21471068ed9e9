"""The arrows between rooms, and who owns which foreign package, proved from the syntax trees."""

from __future__ import annotations

import ast
import functools

from tests.tidy.tree import CLIENT, HTTP, SERVER, Module, imports_of, modules, nodes_of

PACKAGE = "icehouse_server"

ROOMS = (
    "clock",
    "errors",
    "averages",
    "heap",
    "device",
    "small_file",
    "config",
    "domain",
    "pins",
    "telemetry",
    "telemetry.status_page",
    "demo",
    "text.chat",
    "text.values",
    "text.replies",
    "text",
    "vision",
    "structured_output.schema",
    "structured_output",
    "storage",
    "storage.local.encryption",
    "storage.local.block_format",
    "storage.local.directory",
    "storage.local",
    "storage.shared",
    "engine.core",
    "engine.prefix_cache.tiers",
    "engine.prefix_cache",
    "engine.attention",
    "engine.attention.gpu",
    "engine.attention.cpu",
    "engine.kv_cache",
    "engine.kv",
    "engine.sampling",
    "engine.runner.forward",
    "engine.runner.vision",
    "engine.runner.encoders",
    "engine.runner.identity",
    "engine.runner",
    "engine.scheduling",
    "engine",
    "group",
    "rpc.access",
    "rpc.engine_client",
    "rpc.calls",
    "pool",
    "rpc.messages",
    "rpc.image_sources",
    "rpc.kv_events",
    "rpc.services",
    "rpc.worker",
    "rpc",
    "bootstrap.group",
    "bootstrap.imports",
    "bootstrap",
    "cli.terminal",
    "cli.local",
    "cli.service",
    "cli",
)
"""From the ground up: a room imports from itself and from rooms named before it. So there is no circle."""

ENGINE_FACES = {"engine", "engine.core"}
"""What rpc and the command line may see of the engine; the composition root opens every room."""

TIER_OWNERS = ("bootstrap", "cli")
"""Who may know which cold tier there is: the composition root, and the commands on its directory."""

# Package -> rooms (a dot at the end: with their sub-rooms) or modules that may import it.
OWNERS = {
    "mlx": (
        "device",
        "engine.attention.",
        "engine.kv.",
        "engine.kv_cache.",
        "engine.runner.",
        "engine.sampling.",
    ),
    "mlx_lm": (
        "bootstrap.imports.lean_transformers",
        "engine.kv.paged_cache",
        "engine.kv_cache.cache_classes",
        "engine.runner.encoders.gemma",
        "engine.runner.forward.",
        "engine.runner.identity.kv_code",
        "engine.runner.mlx_lm",
    ),
    "mlx_vlm": ("engine.runner.vision.mlx_vlm", "vision.processor"),
    "transformers": ("bootstrap.imports.lean_transformers", "engine.runner.mlx_lm", "vision.processor"),
    "PIL": ("vision.",),
    "grpc": ("group.", "rpc."),
    "grpc_health": ("rpc.",),
    "grpc_reflection": ("rpc.rpc_server",),
    "grpc_status": ("rpc.calls.status",),
    "google": ("rpc.",),
    "icehouse": ("group.", "rpc."),
    "icehouse_client": ("cli.",),
    "icehouse_http": ("cli.main",),
    "jinja2": ("text.chat.template",),
    "jsonschema": ("text.values.arguments",),
    "referencing": ("text.values.arguments",),
    "regex": ("text.values.", "text.replies."),
    "llguidance": ("structured_output.",),
    "sqlite_utils": ("storage.local.directory.manifest", "storage.local.directory.schema"),
    "sqlite3": ("storage.disk_error", "storage.local."),
    "obstore": ("storage.shared.object_store",),
    "cryptography": ("storage.local.encryption.aes_gcm",),
    "prometheus_client": ("telemetry.prometheus",),
    "opentelemetry": ("telemetry.call_spans",),
    "smg_grpc_proto": ("rpc.worker.",),
    "zmq": ("rpc.kv_events.zmq_publisher",),
    "msgpack": ("rpc.kv_events.zmq_publisher",),
    "httpcore2": ("rpc.image_sources.image_fetcher",),
    "huggingface_hub": ("bootstrap.hub", "bootstrap.kept_models"),
    "safetensors": ("demo.mlx_folder",),
    "tokenizers": ("demo.gemma", "demo.mlx_folder", "demo.smollm2"),
    "typer": ("cli.",),
    "uvloop": ("cli.serve",),
    "rich": ("cli.",),
}
SQLITE_ERRORS_ONLY = ("storage.local.directory.manifest",)
"""The one module that uses sqlite3 itself; elsewhere it is an error to catch."""


@functools.cache
def folders() -> dict[str, str]:
    """Return each module's room."""
    return {module.name: module.folder for module in modules(SERVER)}


def is_owner(owners: tuple[str, ...], name: str) -> bool:
    """Whether a module's name without the package is one of the owners or lies in one of their rooms."""
    return any(name == owner or (owner.endswith(".") and name.startswith(owner)) for owner in owners)


def inner(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


def rooms_of(module: Module) -> list[tuple[int, str]]:
    """Return line and room of everything of ours that a module imports."""
    found = []
    for line, name in imports_of(module):
        if name.split(".")[0] == PACKAGE:
            home = name if name in folders() else name.rpartition(".")[0]
            found.append((line, folders()[home]))
    return found


def test_every_room_has_its_place_and_every_place_its_room() -> None:
    assert sorted(ROOMS) == sorted({module.folder for module in modules(SERVER) if module.folder})


def test_imports_go_downwards() -> None:
    wrong = [
        f"{module.path}:{line}: {room}"
        for module in modules(SERVER)
        if module.folder
        for line, room in rooms_of(module)
        if room and ROOMS.index(room) > ROOMS.index(module.folder)
    ]
    assert wrong == []


def test_only_the_composition_root_looks_into_the_engine() -> None:
    wrong = [
        f"{module.path}:{line}: {room}"
        for module in modules(SERVER)
        if module.folder.startswith(("rpc", "cli"))
        for line, room in rooms_of(module)
        if room.startswith("engine") and room not in ENGINE_FACES
    ]
    assert wrong == []


def test_the_tier_on_disk_is_one_room_behind_its_port() -> None:
    """Another kind of cold tier is another folder: nobody but who composes and who mends knows this one, and
    the shared tier, which is this one with a store behind it."""
    wrong = [
        f"{module.path}:{line}: {room}"
        for module in modules(SERVER)
        if not module.folder.startswith(("storage.local", "storage.shared", *TIER_OWNERS))
        for line, room in rooms_of(module)
        if room.startswith("storage.local")
    ]
    assert wrong == []


def test_foreign_packages_stay_in_their_rooms() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules(SERVER)
        for line, name in imports_of(module)
        if (owners := OWNERS.get(name.split(".")[0])) and not is_owner(owners, inner(module.name))
    ]
    assert wrong == []


def test_every_permit_is_used() -> None:
    users: dict[str, set[str]] = {package: set() for package in OWNERS}
    for module in modules(SERVER):
        for _, name in imports_of(module):
            users.get(name.split(".")[0], set()).add(inner(module.name))
    stale = [
        f"{package}: {owner}"
        for package, owners in OWNERS.items()
        for owner in owners
        if not any(is_owner((owner,), user) for user in users[package])
    ]
    assert stale == []


def test_outside_the_manifest_sqlite_is_an_error_to_catch_and_nothing_else() -> None:
    used = {
        f"{module.path}: {node.attr}"
        for module in modules(SERVER)
        if module.folder.startswith("storage") and inner(module.name) not in SQLITE_ERRORS_ONLY
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sqlite3"
        if not node.attr.endswith("Error") and not node.attr.startswith("SQLITE_")
    }
    assert used == set()


TERMINAL = ("typer.", "rich.", "icehouse_client.cli.")
"""What the client's extra `cli` is made of."""


def test_the_client_knows_nothing_of_the_server_nor_of_its_own_command_line() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules(CLIENT)
        for line, name in imports_of(module)
        if name.startswith(PACKAGE)
        or (not module.folder.startswith("cli") and f"{name}.".startswith(TERMINAL))
    ]
    assert wrong == []


def test_the_http_front_is_a_client_like_any_other() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules(HTTP)
        for line, name in imports_of(module)
        if name.startswith(PACKAGE) or f"{name}.".startswith(TERMINAL)
    ]
    assert wrong == []


def test_nothing_below_tests_or_bench_is_imported_by_the_service() -> None:
    wrong = [
        f"{module.path}:{line}"
        for module in modules(SERVER)
        for line, name in imports_of(module)
        if name.split(".")[0] in ("tests", "bench", "clients")
    ]
    assert wrong == []
