"""The environment, the clock, randomness and the cache's files have one door each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.tree import SERVER, Module, modules

SERVICE = modules(SERVER)

# Called name -> modules that may call it (exact names).
DOORS = {
    "os.environ": ("icehouse_server.config.load", "icehouse_server.config.paths"),
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
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, dotted(node)


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_the_process_is_asked_in_one_place(module: Module) -> None:
    wrong = [
        f"{module.path}:{line}: {name}"
        for line, name in names_used(module)
        if name in DOORS and module.name not in DOORS[name]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", [m for m in SERVICE if m.folder.startswith("storage")], ids=lambda m: m.name
)
def test_the_cache_writes_files_behind_its_seam(module: Module) -> None:
    if module.name in FILES_SEAM:
        return
    wrong = [
        f"{module.path}:{node.lineno}: {dotted(node.func)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in FILE_VERBS
    ]
    assert wrong == []


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_no_exception_is_swallowed(module: Module) -> None:
    wrong = [
        f"{module.path}:{node.lineno}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or all(isinstance(statement, ast.Pass) for statement in node.body))
    ]
    assert wrong == []
