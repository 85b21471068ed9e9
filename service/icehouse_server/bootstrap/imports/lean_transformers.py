"""transformers, imported with less: without PyTorch, and without reading what nobody here asks for.

mlx-lm reads tokenizers with transformers, which is most of what a start imports. To learn the names in them,
transformers (5.23) reads every module of its models, twice: it remembers 128 folders, and there are 550. Half
of what it reads is code for PyTorch. Where PyTorch is installed, for something else, it is imported, too,
which takes seconds. None of it has to do with tokenizers, or with the image processors of Pillow.

What is changed here is no public part of transformers. A release without these parts is imported as it is,
and tests/unit/bootstrap/test_lean_transformers.py says so.
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
"""Folder whose modules are tables of names, those of models included."""


def import_mlx_lm() -> None:
    """Import mlx-lm, and transformers with it, if nothing has imported them yet.

    For transformers there is then no PyTorch, and models are no part of it; code that imports PyTorch itself
    gets it. So it is nothing for a model folder whose own code is run.
    """
    if "transformers" in sys.modules:
        return
    finder = _ScannerFinder()
    sys.meta_path.insert(0, finder)
    try:
        with _without("torch"):
            # It keeps transformers from telling that there is no PyTorch.
            import mlx_lm  # noqa: F401
            from transformers.utils.import_utils import is_torch_available

            # The answer is remembered.
            is_torch_available()
    finally:
        sys.meta_path.remove(finder)


class _ScannerFinder(importlib.abc.MetaPathFinder):
    """Finds the one module that reads all others, and has it changed once it is imported."""

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
    """Open a file as `open` does; one with a model for PyTorch is shown empty."""
    file = PurePath(path)
    if file.name.startswith(_FOR_TORCH) and file.parent.name != _MAPPINGS:
        return io.StringIO()
    return open(path, *arguments, **named)


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Have a package that is not imported yet look as if it were not installed."""
    if package in sys.modules:
        yield
        return
    # As Python itself says it: a name with nothing behind it is not found.
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
