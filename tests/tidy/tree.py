"""What the tidy tests look at: the files of the repository and their syntax trees."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "out", "target"}
_SHOWN = {".ci", ".gitattributes", ".gitignore"}
"""What begins with a dot and still is ours; every other such name is a tool's."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One Python file: its dotted name, path relative to the root, text and tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether this is a folder's `__init__`."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """The room, as in `engine.scheduling`; of a module that lies in none its own name."""
        inner = self.name.split(".")[1:]
        return ".".join(inner if self.is_package or len(inner) == 1 else inner[:-1])


SERVER = "service/icehouse_server"
CLIENT = "clients/python/src/icehouse_client"
HTTP = "clients/http/src/icehouse_http"
COMMANDS = f"{CLIENT}/cli"
"""What asks a server from a terminal."""


@functools.cache
def modules(folder: str) -> tuple[Module, ...]:
    """Return every Python module below `folder`, named as it is imported."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if any(_is_skipped(part) for part in relative.parts):
            continue
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        name = (
            name.removeprefix("service.")
            .removeprefix("clients.python.src.")
            .removeprefix("clients.http.src.")
        )
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, relative, text, ast.parse(text)))
    assert found, f"{folder} has no Python files"
    return tuple(found)


@functools.cache
def nodes_of(module: Module) -> tuple[ast.AST, ...]:
    """Return every node of a module's tree."""
    return tuple(ast.walk(module.tree))


@functools.cache
def imports_of(module: Module) -> tuple[tuple[int, str], ...]:
    """Return line and full name of everything a module imports, anywhere in it."""
    found: list[tuple[int, str]] = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: a relative import"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return tuple(found)


def functions_of(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a module, nested ones included."""
    for node in nodes_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@functools.cache
def text_files() -> tuple[tuple[Path, str], ...]:
    """Return every text file of the repository, generated ones left out."""
    found = []
    for folder, folder_names, file_names in os.walk(ROOT):
        # Not gone into: an environment has many times as many files as the repository.
        folder_names[:] = [name for name in folder_names if not _is_skipped(name)]
        for name in file_names:
            path = Path(folder, name)
            relative = path.relative_to(ROOT)
            if _is_skipped(name) or relative.parts[0] == "gen" or path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(UnicodeDecodeError):
                found.append((relative, path.read_text(encoding="utf-8")))
    return tuple(sorted(found))


def _is_skipped(part: str) -> bool:
    return part in _SKIPPED or part.endswith(".egg-info") or (part.startswith(".") and part not in _SHOWN)
