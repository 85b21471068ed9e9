"""The code behind a model's KV: what changes it changes its digests, and nothing else does."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import py_compile
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx_lm
import mlx_lm.utils
import pytest
from icehouse_server.engine.runner.identity import kv_code as tested
from icehouse_server.engine.runner.identity.kv_code import KvCode, adapter_code_digest, kv_code
from icehouse_server.engine.runner.identity.source import FileStamp, find_spec
from icehouse_server.errors import ModelError, Reason
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build, tiny_config
from tests.fixtures.models.vision import FAMILIES, tiny_vision_dir

LLAMA = {"model_type": "llama"}
AWQ = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}
SCALE = "self.scale = head_dim**-0.5"


class Packages:
    """A copy of mlx-lm that is found first, and never imported."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "mlx_lm"
        names = ("models", "tuner", "utils.py", "__init__.py")
        for source in (Path(mlx_lm.__file__).parent / name for name in names):
            copy: Any = shutil.copytree if source.is_dir() else shutil.copy
            target = self.root / source.name
            self.root.mkdir(parents=True, exist_ok=True)
            copy(source, target)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has moved"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def code(self, config: dict[str, Any], *, has_adapter: bool = False) -> KvCode:
        importlib.invalidate_caches()
        return kv_code(self.place, config, has_adapter=has_adapter)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    made = Packages(tmp_path / "packages")
    monkeypatch.syspath_prepend(made.place)
    # What this process runs is another copy.
    monkeypatch.setattr(tested, "_EARLY", {})
    yield made
    importlib.invalidate_caches()


def changed(before: KvCode, after: KvCode) -> set[str]:
    """Return the modules whose digests differ."""
    names = before.digests.keys() | after.digests.keys()
    return {name for name in names if before.digests.get(name) != after.digests.get(name)}


EDITS = [
    pytest.param("models/llama.py", SCALE, f"{SCALE} * 1.7", LLAMA, {"mlx_lm.models.llama"}, id="its own"),
    pytest.param(
        "models/rope_utils.py",
        "def initialize_rope(",
        "def initialize_rope(_=0, *, ",
        LLAMA,
        {"mlx_lm.models.rope_utils"},
        id="a function that it imports",
    ),
    pytest.param(
        "models/cache.py",
        "class KVCache(_BaseCache):",
        "class KVCache(_BaseCache):\n    a = 1",
        LLAMA,
        {"mlx_lm.models.cache"},
        id="its cache",
    ),
    pytest.param(
        "models/cache.py",
        "class _BaseCache:",
        "class _BaseCache:\n    a = 1",
        LLAMA,
        {"mlx_lm.models.cache"},
        id="what its cache is made from",
    ),
    pytest.param(
        "models/cache.py",
        "class ArraysCache(_BaseCache):",
        "class ArraysCache(_BaseCache):\n    a = 1",
        LLAMA,
        set(),
        id="another model's cache",
    ),
    pytest.param(
        "models/cache.py",
        "class BatchKVCache(_BaseCache):",
        "class BatchKVCache(_BaseCache):\n    a = 1",
        LLAMA,
        set(),
        id="a cache of several rows",
    ),
    pytest.param(
        "models/gemma3_text.py",
        "class Model(nn.Module):",
        "class Model(nn.Module):\n    a = 1",
        LLAMA,
        set(),
        id="another model",
    ),
    pytest.param(
        "models/rope_utils.py",
        "class SuScaledRoPE(",
        "# Said between two.\nclass SuScaledRoPE(",
        LLAMA,
        set(),
        id="a comment between statements",
    ),
    pytest.param(
        "models/llama.py",
        SCALE,
        f"{SCALE}  # why",
        LLAMA,
        {"mlx_lm.models.llama"},
        id="a comment inside one",
    ),
    pytest.param(
        "utils.py",
        "def load_model(",
        "def load_model(_=0, *, ",
        LLAMA,
        set(),
        id="what only lays weights",
    ),
    pytest.param(
        "utils.py",
        "def _unpack_awq_weights(",
        "def _unpack_awq_weights(_=0, *, ",
        AWQ,
        {"mlx_lm.utils"},
        id="what computes weights",
    ),
    pytest.param(
        "utils.py",
        '"mistral": "llama",',
        '"mistral": "llama", "a": "b",',
        AWQ,
        set(),
        id="names of models",
    ),
    pytest.param(
        "tuner/lora.py",
        "class LoRALinear(nn.Module):",
        "class LoRALinear(nn.Module):\n    a = 1",
        LLAMA,
        set(),
        id="LoRA where there is none",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "config", "expected"), EDITS)
def test_an_edit_changes_what_it_reaches(
    packages: Packages, name: str, old: str, new: str, config: dict[str, Any], expected: set[str]
) -> None:
    before = packages.code(config)
    packages.edit(name, old, new)
    after = packages.code(config)
    assert changed(before, after) == expected
    assert changed(after, packages.code(config)) == set()


def test_what_was_read_is_read_again_only_where_it_changed(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.code(LLAMA)
    first = packages.code(LLAMA)  # what is compiled for the first time is another file from then on
    really, parsed = ast.parse, list[str]()

    def parse(text: str, *args: Any, **how: Any) -> Any:
        parsed.append(text)
        return really(text, *args, **how)

    monkeypatch.setattr(ast, "parse", parse)
    assert packages.code(LLAMA) == first and not parsed
    packages.edit("models/llama.py", SCALE, f"{SCALE}  # the same")
    assert packages.code(LLAMA) != first and len(parsed) == 1


def test_layers_of_an_adapter_count_where_there_is_one(packages: Packages) -> None:
    before, digest = packages.code(LLAMA, has_adapter=True), adapter_code_digest()
    packages.edit("tuner/dora.py", "class DoRALinear(nn.Module):", "class DoRALinear(nn.Module):\n    a = 1")
    assert changed(before, packages.code(LLAMA, has_adapter=True)) == {"mlx_lm.tuner.dora"}
    assert adapter_code_digest() != digest


def _zip(packages: Packages) -> None:
    with zipfile.ZipFile(packages.place / "mlx_lm.zip", "w") as archive:
        for path in packages.root.rglob("*.py"):
            archive.write(path, path.relative_to(packages.place))
    shutil.rmtree(packages.root)


def test_an_archive_is_what_it_holds(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    before = packages.code(LLAMA)
    _zip(packages)
    monkeypatch.syspath_prepend(packages.place / "mlx_lm.zip")
    assert changed(before, packages.code(LLAMA)) == set()


def _compile(path: Path) -> None:
    """Leave a module's compiled code alone, where an import finds it."""
    py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), doraise=True)
    path.unlink()


def test_code_without_source_is_refused(packages: Packages) -> None:
    _compile(packages.root / "models" / "llama.py")
    with pytest.raises(ModelError, match=r"mlx_lm\.models\.llama .* no source"):
        packages.code(LLAMA)


def test_compiled_code_that_is_not_its_source_is_refused(packages: Packages) -> None:
    """Python asks an unchecked file nothing: it runs the code of before, whatever the source says."""
    path = packages.root / "models" / "llama.py"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), doraise=True, invalidation_mode=mode)
    packages.code(LLAMA)
    packages.edit("models/llama.py", SCALE, f"{SCALE} * 1.7")
    with pytest.raises(ModelError, match="its compiled code"):
        packages.code(LLAMA)


def test_a_module_that_cannot_be_read_is_named(packages: Packages) -> None:
    packages.edit("models/llama.py", "class Attention(nn.Module):", "class Attention(nn.Module:")
    with pytest.raises(ModelError, match=r"mlx_lm\.models\.llama") as caught:
        packages.code(LLAMA)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_file_that_changes_while_the_server_starts_ends_the_start(packages: Packages) -> None:
    code = packages.code(LLAMA)
    code.check(())
    packages.edit("models/base.py", "class BaseModelArgs:", "class BaseModelArgs:\n    a = 1")
    with pytest.raises(ModelError, match=r"mlx_lm\.models\.base changed while the server started"):
        code.check(())


def test_a_file_that_changed_since_it_was_imported_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tested._EARLY["mlx_lm.models.cache"]
    assert isinstance(known, FileStamp), "this process runs mlx-lm"
    kv_code(tmp_path, LLAMA, has_adapter=False)
    older = dataclasses.replace(known, mtime_ns=known.mtime_ns - 1)
    monkeypatch.setattr(tested, "_EARLY", {**tested._EARLY, "mlx_lm.models.cache": older})
    with pytest.raises(ModelError, match=r"mlx_lm\.models\.cache changed while"):
        kv_code(tmp_path, LLAMA, has_adapter=False)


def test_a_class_that_was_not_read_ends_the_start(tmp_path: Path) -> None:
    code = kv_code(tmp_path, LLAMA, has_adapter=False)
    from mlx_lm.models.mamba import Model

    with pytest.raises(ModelError, match=r"made of mlx_lm\.models\.mamba\.Model,? "):
        code.check([Model])


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_class_of_a_model_was_read(tmp_path: Path, architecture: str) -> None:
    model = build(architecture)
    code = kv_code(tmp_path, tiny_config(architecture), has_adapter=False)
    code.check(type(each) for each in (*model.modules(), *make_prompt_cache(model)))
    assert 4 <= sum(name.startswith("mlx_lm.") for name in code.digests) <= 15


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_class_of_a_model_that_sees_was_read(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    from icehouse_server.engine.runner.vision import mlx_vlm

    folder = tiny_vision_dir(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    code = kv_code(folder, config, has_adapter=False)
    model, tower, _ = mlx_vlm.read_model(folder, lazy=True)
    classes = {type(layer) for part in (model, tower) for layer in part.modules()}
    assert Module in {base for each in classes for base in each.__mro__}
    code.check(classes | {type(cache) for cache in model.make_cache()})


REMAPPED: list[dict[str, Any]] = [
    *({"model_type": kind} for kind in mlx_lm.utils.MODEL_REMAPPING),
    *(
        {"model_type": kind, "architectures": [architecture]}
        for kind, architecture in mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING
    ),
    {"model_type": "qwen3"},
    {"model_type": "llama", "architectures": "LlamaForCausalLM"},
]


@pytest.mark.parametrize("config", REMAPPED, ids=lambda config: "-".join(map(str, config.values())))
def test_the_architecture_is_the_one_that_mlx_lm_chooses(config: dict[str, Any]) -> None:
    try:
        chosen = mlx_lm.utils._get_classes(config)[0].__module__
    except ValueError:
        # Its table names a module that this release lacks.
        chosen = "none"
    named = f"mlx_lm.models.{tested._architecture(config)}"
    assert named == chosen or (chosen == "none" and find_spec(named) is None)


def test_a_folders_own_module_counts_with_what_it_imports_and_what_lies_beside_it(packages: Packages) -> None:
    folder, config = packages.place, {**LLAMA, "model_file": "own.py"}
    (folder / "own.py").write_text("from mlx_lm.models.gear import ModelArgs\nclass Model: ...\n")
    before = packages.code(config)
    (folder / "helper.py").write_text("A = 1\n")
    after = packages.code(config)
    assert changed(before, after) == {"custom_model files"}
    (folder / "own.py").write_text("from mlx_lm.models.gear import ModelArgs\nclass Model: a = 1\n")
    assert changed(after, packages.code(config)) == {"custom_model", "custom_model files"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: None,
        lambda folder: (folder / "own.py").write_text("def"),
        lambda folder: (folder / "own.py").write_bytes(b"\xff"),
        lambda folder: (folder / "own.py").mkdir(),
    ],
    ids=["not there", "no Python", "no text", "a folder"],
)
def test_a_folders_own_module_that_cannot_be_read_is_named(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(tmp_path)
    with pytest.raises(ModelError, match=r"own\.py"):
        kv_code(tmp_path, {**LLAMA, "model_file": "own.py"}, has_adapter=False)


def test_a_model_that_nobody_knows_is_for_the_loader_to_refuse(tmp_path: Path) -> None:
    code = kv_code(tmp_path, {"model_type": "no such thing"}, has_adapter=False)
    assert "mlx_lm.models.no such thing" not in code.digests
