"""Source of installed modules, statement by statement, read as an import would find it; nothing is imported.

Top-level statements count as they are written: a comment or blank line inside a function counts, one between
functions does not. Unlike a syntax tree or bytecode, the text does not depend on the version of Python.

What Python runs may differ from the source beside it: a module may exist only in compiled form, or its
compiled code may not be checked against its source. Such a module is unreadable.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from types import CodeType
from typing import Any, Final

EVERY_NAME: Final = "*"


class UnreadableSource(Exception):
    """A module exists but its code cannot be read; the message says which and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """The state of a module's file: equal as long as nobody replaces it or writes to it."""

    path: str
    inode: int
    size_bytes: int
    mtime_ns: int

    def is_current(self) -> bool:
        return stamp_of(self.path) == self


@dataclasses.dataclass(frozen=True, slots=True)
class Import:
    """A name of a module; the module itself if the name is ""; all its names if it is `EVERY_NAME`."""

    module: str
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleStatement:
    """A top-level statement of a module, other than an import."""

    text: str
    binds: frozenset[str]
    is_effect: bool
    """It does something whenever the module runs, even if nobody uses what it binds."""
    uses: frozenset[str]
    imports: tuple[Import, ...]
    """Imports made inside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module: its statements, and its top-level imports."""

    name: str
    is_package: bool
    statements: tuple[ModuleStatement, ...]
    imports: tuple[tuple[str, Import], ...]
    """With the names that they bind."""
    stamp: FileStamp | None
    """None for a module without a file of its own."""


def read_source(name: str) -> ModuleSource | None:
    """Return an installed module; None if there is none. Raises UnreadableSource."""
    spec = find_spec(name)
    return None if spec is None else source_of(spec)


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module as an import would, without importing the packages that contain it."""
    path: Any = None
    found: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        here = ".".join(parts[:count])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        found = next((spec for find in finders if find and (spec := find(here, path))), None)
        if found is None:
            return None
        path = found.submodule_search_locations
        if path is None and count < len(parts):
            return None
    return found


def stamp_of(path: str | None) -> FileStamp | None:
    """Return the current stamp of a file; None if there is none."""
    if path is None:
        return None
    try:
        info = os.stat(path)
    except OSError:
        return None
    return FileStamp(path, info.st_ino, info.st_size, info.st_mtime_ns)


def source_of(spec: ModuleSpec) -> ModuleSource:
    """Return a module that was found. A file is read again only if it, or its compiled code, has changed.
    Raises UnreadableSource."""
    stamp = stamp_of(spec.origin)
    found = _Found(spec.name, stamp, stamp_of(spec.cached), spec)
    return _read_source(found) if stamp is None else _source_in_file(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    name: str
    stamp: FileStamp | None
    compiled: FileStamp | None
    spec: ModuleSpec = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=1024)
def _source_in_file(found: _Found) -> ModuleSource:
    return _read_source(found)


def _read_source(found: _Found) -> ModuleSource:
    spec, stamp = found.spec, found.stamp
    is_package = spec.submodule_search_locations is not None
    loader: Any = spec.loader
    if loader is None or spec.origin is None:
        # A folder that is a package without a module of its own.
        return ModuleSource(spec.name, is_package, (), (), stamp)
    try:
        text = loader.get_source(spec.name)
        if text is not None and loader.get_code(spec.name) == _as_compiled(text, spec.origin):
            statements, imports = _read(ast.parse(text), text, spec.parent or "")
            return ModuleSource(spec.name, is_package, statements, imports, stamp)
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError, EOFError) as error:
        raise UnreadableSource(f"{spec.name} in {spec.origin} cannot be read: {error}") from error
    raise UnreadableSource(
        f"{spec.name} in {spec.origin} has no source matching its compiled code; reinstall it"
    )


def _as_compiled(text: str, path: str) -> CodeType:
    with warnings.catch_warnings():
        # Only an import should show its warnings.
        warnings.simplefilter("ignore")
        return compile(text, path, "exec", dont_inherit=True)


def _read(
    tree: ast.Module, text: str, package: str
) -> tuple[tuple[ModuleStatement, ...], tuple[tuple[str, Import], ...]]:
    lines = text.split("\n")
    statements: list[ModuleStatement] = []
    imports: list[tuple[str, Import]] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _imported(node, package)
        elif not (_is_text(node) or _is_for_checkers(node)):
            statements.append(_statement(node, lines, package))
    return tuple(statements), tuple(imports)


def _statement(node: ast.stmt, lines: list[str], package: str) -> ModuleStatement:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    inner = list(ast.walk(node))
    imports = [
        pair
        for child in inner
        if isinstance(child, ast.Import | ast.ImportFrom)
        for pair in _imported(child, package)
    ]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        binds, is_effect = {node.name}, False
    else:
        binds = {bound for bound, _ in imports}
        binds |= {
            child.id for child in inner if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load)
        }
        binds |= {child.name for child in inner if isinstance(child, ast.FunctionDef | ast.ClassDef)}
        is_effect = not binds or any(_acts(child) for child in inner)
    return ModuleStatement(
        text="\n".join(lines[first - 1 : node.end_lineno]),
        binds=frozenset(binds),
        is_effect=is_effect,
        uses=frozenset(child.id for child in inner if isinstance(child, ast.Name)),
        imports=tuple(imported for _, imported in imports),
    )


def _acts(node: ast.AST) -> bool:
    """Whether it changes something that it does not bind."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Expr) and not _is_text(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_checkers(node: ast.AST) -> bool:
    """Whether it is there only for type checkers."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Import]]:
    """Yield the names that an import binds, with what they stand for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], Import(alias.name)
        return
    module = resolve_name("." * node.level + (node.module or ""), package)
    for alias in node.names:
        yield alias.asname or alias.name, Import(module, alias.name)


def digest_of(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
