"""Files of one noun, functions of one thought, folders one can look over, a sentence on everything public."""

from __future__ import annotations

import ast
import collections

from tests.tidy.tree import COMMANDS, HTTP, SERVER, Module, functions_of, modules, nodes_of

FILE_LINE_LIMIT = 500
FUNCTION_LINE_LIMIT = 62
FOLDER_MODULE_LIMIT = 12
CONSTRUCTOR_PARAMETER_LIMIT = 8
PREFIX_MODULE_LIMIT = 2


def house() -> tuple[Module, ...]:
    return (*modules(SERVER), *modules(COMMANDS), *modules(HTTP))


def test_files_are_short() -> None:
    lines = {str(module.path): module.text.count("\n") for module in house()}
    assert {path: count for path, count in lines.items() if count > FILE_LINE_LIMIT} == {}


def test_functions_are_short() -> None:
    long = [
        f"{module.path}:{f.lineno}: {f.name} has {f.end_lineno - f.lineno + 1} lines"
        for module in house()
        for f in functions_of(module)
        if f.end_lineno is not None and f.end_lineno - f.lineno >= FUNCTION_LINE_LIMIT
    ]
    assert long == []


def test_constructors_take_what_belongs_together_as_one() -> None:
    crowded = {
        node.name
        for module in house()
        for node in nodes_of(module)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) + len(method.args.kwonlyargs) - 1 > CONSTRUCTOR_PARAMETER_LIMIT
    }
    assert crowded == set(), "a group of parameters is missing its noun"


def test_folders_are_small() -> None:
    sizes = collections.Counter(m.path.parent for m in house() if not m.is_package)
    assert {folder: size for folder, size in sizes.items() if size > FOLDER_MODULE_LIMIT} == {}


def test_a_prefix_that_three_files_share_is_a_folder() -> None:
    shared = collections.Counter(
        (m.path.parent, m.path.stem.partition("_")[0]) for m in house() if not m.is_package
    )
    assert {place: count for place, count in shared.items() if count > PREFIX_MODULE_LIMIT} == {}


def test_everything_public_says_what_it_is() -> None:
    """Modules, classes and module-level functions; methods speak through their class and protocol."""
    silent = []
    for module in house():
        if module.tree.body and not ast.get_docstring(module.tree):
            silent.append(str(module.path))
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{module.path}:{node.lineno}: {node.name}")
    assert silent == []


RIDDLES = {"a", "an", "the", "of", "from", "everything"}
RIDDLES |= {"how", "what", "when", "where", "which", "who", "whose", "why"}
RIDDLES |= {"asks", "compiles", "getting", "making", "puts", "putting", "reading", "refuses", "watches"}


def first_word(module: Module) -> str:
    return (ast.get_docstring(module.tree) or "").split(" ", 1)[0].lower().rstrip(":,.")


def test_a_file_says_its_noun_first() -> None:
    """So that a reader who looks for the admission control finds it by its name."""
    riddles = [
        str(module.path) for module in house() if not module.is_package and first_word(module) in RIDDLES
    ]
    assert riddles == []
