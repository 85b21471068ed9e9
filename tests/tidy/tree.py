"""What the tidy tests look at: the files of the repository and their syntax trees."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_SKIPPED = {"build", "dist", "node_modules", "out", "target"}
_SHOWN = {".ci", ".gitattributes", ".gitignore"}
"""What begins with a dot and still is ours; every other such name is a tool's."""


@dataclasses.dataclass(frozen=True, slots=True)
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


@functools.cache
def modules(folder: str) -> tuple[Module, ...]:
    """Return every Python module below `folder`, named as it is imported."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if _is_skipped(relative):
            continue
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__").removeprefix("service.")
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, relative, text, ast.parse(text)))
    assert found, f"{folder} has no Python files"
    return tuple(found)


def imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything a module imports, anywhere in it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def functions_of(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a module, nested ones included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def text_files() -> Iterator[tuple[Path, str]]:
    """Yield every text file of the repository, generated ones left out."""
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        if _is_skipped(relative) or relative.parts[0] == "gen" or path.is_symlink() or not path.is_file():
            continue
        try:
            yield relative, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _is_skipped(relative: Path) -> bool:
    return any(
        part in _SKIPPED or part.endswith(".egg-info") or (part.startswith(".") and part not in _SHOWN)
        for part in relative.parts
    )
