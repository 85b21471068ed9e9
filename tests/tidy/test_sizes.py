"""Files of one noun, functions of one thought, a sentence on everything public."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.tree import Module, functions_of, modules

FILE_LINE_LIMIT = 320
FUNCTION_LINE_LIMIT = 62

SERVICE = modules("service")


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_files_are_short(module: Module) -> None:
    assert module.text.count("\n") <= FILE_LINE_LIMIT


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_functions_are_short(module: Module) -> None:
    long = [
        f"{module.path}:{f.lineno}: {f.name} has {f.end_lineno - f.lineno + 1} lines"
        for f in functions_of(module)
        if f.end_lineno is not None and f.end_lineno - f.lineno >= FUNCTION_LINE_LIMIT
    ]
    assert long == []


@pytest.mark.parametrize("module", SERVICE, ids=lambda m: m.name)
def test_everything_public_says_what_it_is(module: Module) -> None:
    """Modules, classes and module-level functions; methods speak through their class and protocol."""
    silent = [] if ast.get_docstring(module.tree) or not module.tree.body else [str(module.path)]
    for node in module.tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("_") and not ast.get_docstring(node):
            silent.append(f"{module.path}:{node.lineno}: {node.name}")
    assert silent == []
