"""The environment, the clock, randomness, the cache's files and mlx-lm's cache classes have one door each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import SERVER, Module, modules, nodes_of

# Called name -> modules that may call it (exact names).
DOORS = {
    "os.environ": ("icehouse_server.config.load", "icehouse_server.config.user_paths"),
    "os.getenv": (),
    "time.time": ("icehouse_server.clock",),
    "time.monotonic": ("icehouse_server.clock",),
    "time.sleep": (),
    "random.random": (),
}

# Verbs that change files; in the storage rooms they stand behind the files seam.
FILE_VERBS = {
    "open",
    "os.open",
    "os.write",
    "os.writev",
    "os.pwrite",
    "os.pwritev",
    "os.rename",
    "os.replace",
    "os.unlink",
    "os.remove",
    "os.mkdir",
    "os.makedirs",
    "os.rmdir",
    "os.fsync",
    "os.truncate",
    "os.ftruncate",
    "os.chmod",
    "os.link",
    "shutil.rmtree",
    "shutil.move",
}
PATH_VERBS = {"write_text", "write_bytes", "unlink", "rename", "mkdir", "rmdir", "touch", "chmod"}
FILES_SEAM = ("icehouse_server.storage.files",)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_used(module: Module) -> Iterator[tuple[int, str]]:
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, dotted(node)


def test_the_process_is_asked_in_one_place() -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for module in modules(SERVER)
        for line, name in names_used(module)
        if name in DOORS and module.name not in DOORS[name]
    ]
    assert wrong == []


def test_the_cache_writes_files_behind_its_seam() -> None:
    wrong = [
        f"{module.path}:{node.lineno}: {dotted(node.func)}"
        for module in modules(SERVER)
        if module.folder.startswith("storage") and module.name not in FILES_SEAM
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and dotted(node.func) in FILE_VERBS
    ]
    assert wrong == []


def test_no_exception_is_swallowed() -> None:
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in modules(SERVER)
        for node in nodes_of(module)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or all(isinstance(statement, ast.Pass) for statement in node.body))
    ]
    assert wrong == []


CACHE_CLASS_NAME = re.compile(r"\w*(KV|Arrays)Cache|CacheList")
CACHE_TABLE = "icehouse_server.engine.kv_cache.cache_classes"


def names_of(node: ast.AST) -> list[str]:
    """Return what a node may name a class by."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.name.rpartition(".")[2] for alias in node.names]
    if isinstance(node, ast.Name | ast.Attribute):
        return [dotted(node).rpartition(".")[2]]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_cache_classes_are_told_apart_in_one_table() -> None:
    """Elsewhere no class of mlx-lm's caches is named, as a class or in a string, and no type is compared."""
    wrong = []
    for module in modules(SERVER):
        if module.folder.partition(".")[0] != "engine" or module.name == CACHE_TABLE:
            continue
        for node in nodes_of(module):
            named = [word for word in names_of(node) if CACHE_CLASS_NAME.fullmatch(word)]
            wrong += [f"{module.path}: {word}" for word in named]
            if isinstance(node, ast.Compare):
                calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and dotted(n.func) == "type"]
                wrong += [f"{module.path}:{node.lineno}: a type is compared" for _ in calls]
    assert wrong == []
