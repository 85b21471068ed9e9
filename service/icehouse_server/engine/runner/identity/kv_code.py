"""Code that a model's KV is computed by, as digests by module: blocks survive a change of any other code.

- *The model's own*: its architecture's module, and everything in mlx-lm or mlx-vlm that this uses (base
  classes, RoPE, switch layers, cache classes). By statements, not by modules: nearly every release of mlx-lm
  changes `cache.py` or `base.py` somewhere, so whole modules would make every architecture cold each time.
  By statements, none changed from 0.31.0 to 0.31.1, 53 of 123 from 0.32.0 to 0.32.1, and 6 of 124 from
  there to 0.32.2.
- *What loads it*, if that computes weights (quantization other than MLX's own; LoRA layers). MLX's own
  weights are only assigned by name, and shapes that do not fit are refused.
- *MLX*: its release and its layers in Python. Changes in the compiled library cannot be seen from here and
  may concern RoPE, so another release begins cold with every model.
- *Ours*: `OWN_VERSION`, raised by hand if KV or blocks come out differently. Our files change with each
  release, nearly always to be faster, and a digest of them would begin cold each time. A test fails when one
  of these files changes, until somebody has decided.

Not included: the libraries below MLX (BLAS, CUDA, Metal), other packages that a model folder's own code
imports, and code that prepares images, whose result is in the blocks' names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from icehouse_server.engine.kv_cache.cache_classes import CACHE_CLASSES
from icehouse_server.engine.runner.identity.source import (
    EVERY_NAME,
    FileStamp,
    Import,
    ModuleSource,
    ModuleStatement,
    UnreadableSource,
    digest_of,
    find_spec,
    read_source,
    source_of,
    stamp_of,
)
from icehouse_server.engine.runner.vision import mlx_vlm
from icehouse_server.errors import ModelError, model_invalid

OWN_VERSION: Final = 2
"""Version of the code with which this server computes KV and cuts blocks. Raise it when either comes out
differently by more than rounding, even if a fault was mended."""

_PACKAGES: Final = ("mlx_lm", "mlx_vlm")
_CUSTOM: Final = "custom_model"
"""What mlx-lm and mlx-vlm call a model folder's own module."""
_SEAM: Final = (
    Import("mlx_lm.models.base", "create_attention_mask"),
    Import("mlx_lm.models.base", "scaled_dot_product_attention"),
    Import("mlx_lm.models.cache", "create_attention_mask"),
    Import("mlx_lm.models.cache", "make_prompt_cache"),
)
"""What our own pass uses from mlx-lm for every model."""
_CACHES: Final = tuple(
    Import(kind.__module__, kind.__name__) for kind in CACHE_CLASSES if kind.__module__.startswith("mlx_lm.")
)
_ADAPTERS: Final = Import("mlx_lm.tuner.utils", "load_adapters")
_NOT_FOLLOWED: Final = (
    # They choose the module, which is known.
    Import("mlx_lm.utils", "_get_classes"),
    Import("mlx_vlm.utils", "get_model_and_args"),
    # Caches of several rows, which are never made here.
    *(Import(f"{package}.models.cache", f"Batch{kind.name}") for package in _PACKAGES for kind in _CACHES),
)


@dataclasses.dataclass(frozen=True, slots=True)
class KvCode:
    """The code that computes a model's KV, as it was when it was read."""

    digests: Mapping[str, str]
    """By module. "mlx" is its release and "icehouse" our number, as they are."""
    stamps: Mapping[str, FileStamp]
    """Of the modules' files, when they were read."""
    names: frozenset[Import]
    """The names that were read in mlx-lm and mlx-vlm."""

    def check(self, classes: Iterable[type]) -> None:
        """Compare what was read with what runs: a loaded model, made of these classes.

        Raises ModelError if a file has changed since, for example because a package was installed while the
        server starts, or if a class was not read.
        """
        changed = [name for name, stamp in self.stamps.items() if not stamp.is_current()]
        if changed:
            raise _changed(changed)
        unread = sorted(f"{home.module}.{home.name}" for home in set(_homes(classes)) - self.names)
        if unread:
            raise model_invalid(
                f"the model is made of {', '.join(unread)}, whose code its fingerprint does not cover, so "
                "blocks might survive a change to it; serve it without an SSD tier, and report this"
            )


def kv_code(model_dir: Path, config: Mapping[str, Any], *, has_adapter: bool) -> KvCode:
    """Read the code that computes the KV of a model folder, importing none of it.

    Raises ModelError if some of it exists but cannot be read.
    """
    try:
        custom = _custom_source(model_dir, config)
        reach = Reach(custom)
        reach.follow(_roots(model_dir, config))
        if has_adapter:
            reach.follow([_ADAPTERS])
        digests = reach.digests()
        if custom:
            # The folder's module may run any of its Python files.
            digests[f"{_CUSTOM} files"] = _files_digest(model_dir, sorted(model_dir.rglob("*.py")))
        digests["mlx.nn"] = _mlx_digest()
    except (UnreadableSource, OSError) as error:
        raise model_invalid(f"the code of the model in {model_dir}: {error}") from error
    stamps = reach.stamps()
    # Already imported, so what runs is what the files were then.
    early = [name for name in stamps if name in _EARLY and stamps[name] != _EARLY[name]]
    if early:
        raise _changed(early)
    digests |= {"mlx": str(vars(mx)["__version__"]), "icehouse": str(OWN_VERSION)}
    return KvCode(digests, stamps, reach.names())


def adapter_code_digest() -> str:
    """Return the digest of the code of LoRA layers. Raises ModelError."""
    reach = Reach()
    try:
        reach.follow([_ADAPTERS])
    except UnreadableSource as error:
        raise model_invalid(f"the code of LoRA adapters: {error}") from error
    return digest_of(f"{name}={digest}" for name, digest in reach.digests().items())


class Reach:
    """Every statement of the followed packages that some given names may run; `follow` adds names. Raises
    UnreadableSource.

    It goes from a name to the statement that binds it, from there to the names that this statement uses, and
    through imports into other modules. A module that is used as a whole (`from . import llama`) counts whole.
    A module that is imported but not used, or only for its effects, does not count. Names made at run time
    (`getattr`, `importlib`) are not seen: the caller must name them.
    """

    def __init__(self, given: Iterable[ModuleSource] = ()) -> None:
        """`given` are modules that no import can find."""
        self._sources: dict[str, ModuleSource | None] = {source.name: source for source in given}
        self._statements: dict[str, set[ModuleStatement]] = {}
        self._imports: dict[str, set[str]] = {}
        self._seen: set[Import] = set(_NOT_FOLLOWED)

    def follow(self, roots: Iterable[Import]) -> None:
        """Add everything that these names reach."""
        waiting = list(roots)
        while waiting:
            wanted = waiting.pop()
            if wanted in self._seen:
                continue
            self._seen.add(wanted)
            source = self._source(wanted.module)
            if source is not None:
                waiting += self._reach(source, wanted.name)

    def digests(self) -> dict[str, str]:
        """Return the digest of what was reached, by module."""
        digests = {}
        for name, statements in sorted(self._statements.items()):
            source = self._sources[name]
            assert source is not None, name
            texts = [statement.text for statement in source.statements if statement in statements]
            texts += sorted(self._imports[name])
            if texts:
                digests[name] = digest_of(texts)
        return digests

    def names(self) -> frozenset[Import]:
        return frozenset(
            Import(module, name)
            for module, statements in self._statements.items()
            for statement in statements
            for name in statement.binds
        )

    def stamps(self) -> dict[str, FileStamp]:
        """Return the stamps of the reached modules' files when they were read."""
        sources = {name: self._sources[name] for name in self._statements}
        return {name: source.stamp for name, source in sources.items() if source and source.stamp}

    def _source(self, module: str) -> ModuleSource | None:
        if module not in self._sources:
            is_followed = module.partition(".")[0] in _PACKAGES
            self._sources[module] = read_source(module) if is_followed else None
        return self._sources[module]

    def _reach(self, source: ModuleSource, name: str) -> list[Import]:
        """Add what one name of a module stands for; return what that needs in turn."""
        needed: list[Import] = []
        if source.name not in self._statements:
            self._statements[source.name], self._imports[source.name] = set(), set()
            needed += self._add(source, [s for s in source.statements if s.is_effect])
        if name in ("", EVERY_NAME):
            needed += self._add(source, source.statements)
            if source.is_package or name == EVERY_NAME:
                # What a package passes on; `import a.b` is there only for its effects.
                needed += [Import(source.name, bound) for bound, target in source.imports if target.name]
            return needed
        bound = [statement for statement in source.statements if name in statement.binds]
        imported = [target for alias, target in source.imports if alias == name]
        if bound or imported:
            self._imports[source.name] |= {f"{name}={target.module}:{target.name}" for target in imported}
            return needed + self._add(source, bound) + imported
        if source.is_package and self._source(f"{source.name}.{name}") is not None:
            return [*needed, Import(f"{source.name}.{name}")]
        stars = [Import(target.module, name) for _, target in source.imports if target.name == EVERY_NAME]
        lazy = [s for s in source.statements if "__getattr__" in s.binds]
        return needed + stars + self._add(source, lazy)

    def _add(self, source: ModuleSource, statements: Sequence[ModuleStatement]) -> list[Import]:
        needed: list[Import] = []
        for statement in statements:
            if statement not in self._statements[source.name]:
                self._statements[source.name].add(statement)
                needed += [Import(source.name, name) for name in statement.uses]
                needed += statement.imports
        return needed


def _homes(classes: Iterable[type]) -> Iterator[Import]:
    """Yield where classes and their base classes are defined, in the followed packages."""
    for base in {base for run in classes for base in run.__mro__}:
        if base.__module__.partition(".")[0] in _PACKAGES:
            yield Import(base.__module__, base.__qualname__.partition(".")[0])


def _roots(model_dir: Path, config: Mapping[str, Any]) -> list[Import]:
    roots = list(_SEAM)
    is_foreign = _is_foreign(model_dir, config)
    if mlx_vlm.is_used(model_dir, dict(config)):
        kind = str(config["model_type"]).lower().replace("-", "_")
        # mlx-lm's cache classes replace mlx-vlm's own.
        roots += _CACHES
        roots += [Import(f"mlx_vlm.models.{kind}"), Import("mlx_vlm.models.cache", "make_prompt_cache")]
        roots += [Import("mlx_vlm.utils", "load_model")] if is_foreign else []
    else:
        roots += [
            Import(f"mlx_lm.models.{_architecture(config)}"),
            Import("mlx_lm.utils", "infer_quant_config"),
        ]
        roots += [Import("mlx_lm.utils", "load_model")] if is_foreign else []
    if config.get("model_file"):
        roots.append(Import(_CUSTOM))
    return roots


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the module of mlx-lm for a model, as `mlx_lm.utils._get_classes` chooses it."""
    kind = str(config.get("model_type"))
    named = config.get("architectures") or ()
    for architecture in (named,) if isinstance(named, str) else named:
        remapped = MODEL_ARCHITECTURE_REMAPPING.get((kind, architecture))
        if remapped is not None:
            return str(remapped)
    return str(MODEL_REMAPPING.get(kind, kind))


def _is_foreign(model_dir: Path, config: Mapping[str, Any]) -> bool:
    """Whether loading converts the weights to MLX's own form, or exchanges layers."""
    text = config.get("text_config")
    texts = (config, text if isinstance(text, Mapping) else {})
    if any(each.get("quantize_activations") for each in texts):
        return True
    if config.get("quantization"):
        return False
    return (
        any(each.get("quantization_config") for each in texts)
        or (model_dir / "hf_quant_config.json").exists()
    )


def _custom_source(model_dir: Path, config: Mapping[str, Any]) -> list[ModuleSource]:
    """Return the folder's own module, if config.json names one."""
    name = config.get("model_file")
    if not isinstance(name, str):
        return []
    spec = importlib.util.spec_from_file_location(_CUSTOM, model_dir / name)
    if spec is None:
        raise UnreadableSource(f"{model_dir / name} is not a Python module")
    return [source_of(spec)]


def _mlx_digest() -> str:
    """Return the digest of MLX's layers and helpers in Python."""
    spec = find_spec("mlx")
    roots = [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []
    return digest_of(
        _files_digest(root, sorted(root.glob("nn/**/*.py")) + sorted(root.glob("*.py"))) for root in roots
    )


def _files_digest(root: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(os.fsencode(path.relative_to(root)) + b"\x00" + content)
    return digest.hexdigest()


def _changed(names: Iterable[str]) -> ModelError:
    return model_invalid(
        f"{', '.join(names)} changed while the server started, so it may run neither the old code nor "
        "the new; restart it"
    )


def _early_stamps() -> dict[str, FileStamp | None]:
    """Return the stamps of the files of all modules imported so far."""
    loaded = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES]
    specs = [(name, getattr(module, "__spec__", None)) for name, module in loaded]
    return {name: stamp_of(spec.origin) for name, spec in specs if spec is not None}


_EARLY: Final = _early_stamps()
"""Files are read later, for the fingerprint, and a model may be downloaded in between."""
