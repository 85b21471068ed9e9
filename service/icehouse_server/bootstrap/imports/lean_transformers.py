"""transformers, imported faster: without PyTorch, and without reading what nobody here needs.

mlx-lm reads tokenizers with transformers, which is most of what a start imports. To learn their names,
transformers (5.23) reads all modules of its models, twice: it remembers 128 folders, and there are 550. Half
of that is code for PyTorch. If PyTorch is installed for something else, it is imported too, which takes
seconds. None of this is needed for tokenizers, or for Pillow's image processors.

What is changed here is not part of transformers' public API. A release without these parts is imported
unchanged, and tests/unit/bootstrap/test_lean_transformers.py reports it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import PurePath
from types import ModuleType
from typing import Any, Final

_SCANNER: Final = "transformers.utils.import_utils"
_SCAN: Final = "create_import_structure_from_path"
_FOR_TORCH: Final = "modeling_"
_MAPPINGS: Final = "auto"
"""Folder whose modules are tables of names, also of models."""


def import_mlx_lm() -> None:
    """Import mlx-lm, and transformers with it, if nothing has imported them yet.

    After that, transformers finds no PyTorch and lacks its models; code that imports PyTorch itself gets it.
    So do not call this for a model folder whose own code is run.
    """
    if "transformers" in sys.modules:
        return
    finder = _ScannerFinder()
    sys.meta_path.insert(0, finder)
    try:
        with _without("torch"):
            # mlx_lm keeps transformers from announcing that there is no PyTorch.
            import mlx_lm  # noqa: F401
            from transformers.utils.import_utils import is_torch_available

            # transformers remembers the answer.
            is_torch_available()
    finally:
        sys.meta_path.remove(finder)


class _ScannerFinder(importlib.abc.MetaPathFinder):
    """Finds the one module that reads all others, and patches it after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _SCANNER else None
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_ScannerLoader(fullname, spec.origin)
        )


class _ScannerLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan = getattr(vars(module).get(_SCAN), "__wrapped__", None)
        if scan is not None:
            vars(module)[_SCAN] = functools.cache(scan)
            vars(module)["open"] = _open_for_names


def _open_for_names(path: Any, *arguments: Any, **named: Any) -> Any:
    """Open a file as `open` does, but show files with PyTorch models as empty."""
    file = PurePath(path)
    if file.name.startswith(_FOR_TORCH) and file.parent.name != _MAPPINGS:
        return io.StringIO()
    return open(path, *arguments, **named)


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Make a package that is not imported yet look as if it were not installed."""
    if package in sys.modules:
        yield
        return
    # Python's own convention: a name whose value is None is not found.
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
