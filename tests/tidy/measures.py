"""Measures of the server's code: `python -m tests.tidy.measures` prints them, to be compared over time."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterator

from tests.tidy.tree import ROOT, SERVER, Module, modules


def main() -> None:
    """Print one measure a line."""
    for name, value in measures():
        print(f"{value:>10,}  {name}")


def measures() -> Iterator[tuple[str, int]]:
    """Yield what is measured and its value."""
    found = modules(SERVER)
    nodes = [node for module in found for node in ast.walk(module.tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lengths = sorted(
        _length(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    yield "lines", sum(map(_line_count, found))
    for room in ("engine", "storage", "rpc"):
        yield f"lines of {room}", sum(_line_count(m) for m in found if m.name.split(".")[1:2] == [room])
    yield "files", len(found)
    yield "files with one importer", sum(count == 1 for count in _importer_counts(found).values())
    file_names = Counter(module.path.name for module in found if not module.is_package)
    yield "file names used twice or more", sum(count > 1 for count in file_names.values())
    yield "classes", len(classes)
    yield "dataclasses without a method", sum(map(_is_data_only, classes))
    class_names = Counter(node.name for node in classes)
    yield "class names used twice or more", sum(count > 1 for count in class_names.values())
    yield "functions", len(lengths)
    yield "lines of a function, median", int(statistics.median(lengths))
    yield "lines of a function, 90th percentile", lengths[9 * len(lengths) // 10]
    yield "lines of the longest function", lengths[-1]
    yield "bytes of ARCHITECTURE.md", (ROOT / "ARCHITECTURE.md").stat().st_size
    yield "lines of CHANGELOG.md", len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines())


def _line_count(module: Module) -> int:
    return len(module.text.splitlines())


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _is_data_only(node: ast.ClassDef) -> bool:
    is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return is_dataclass and not any(isinstance(each, ast.FunctionDef) for each in node.body)


def _importer_counts(found: tuple[Module, ...]) -> Counter[str]:
    """Return how many modules import each one, packages left out."""
    names = {module.name for module in found if not module.is_package}
    counts = Counter(dict.fromkeys(names, 0))
    for module in found:
        imported = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                imported |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        counts.update(imported & names - {module.name})
    return counts


if __name__ == "__main__":
    main()
