"""The fingerprint changes with whatever KV depends on and with nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, NO_ADAPTER, AdapterDigest, AdapterName
from icehouse_server.domain.model import AdapterInfo
from icehouse_server.engine.runner.identity import fingerprint, kv_code
from icehouse_server.engine.runner.identity.fingerprint import (
    ModelFingerprint,
    adapter_digest,
    model_fingerprint,
    system_digest_hex,
)
from icehouse_server.errors import ModelError, Reason
from icehouse_server.storage.digests import DigestBook
from icehouse_server.storage.files import Files
from icehouse_server.storage.storage_settings import CODE_DETAIL

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.rpc.fake_engine import MODEL_INFO


def _of(folder: Path, **overrides: Any) -> ModelFingerprint:
    settings: dict[str, Any] = {"dtype": "float32", "kv_format": "float32", "block_token_count": 256}
    book = DigestBook(str(folder.parent / "book"), files=Files(), clock=SystemClock())
    return model_fingerprint(folder, **{"book": book, **settings, **overrides})


def change_one_float(path: Path, *, at: float = 0.4) -> None:
    """Change the lowest bit of a number in place, and set size and time as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        position = 8 + header_bytes + int((before.st_size - 8 - header_bytes) * at) // 4 * 4
        file.seek(position)
        (number,) = struct.unpack("<I", file.read(4))
        file.seek(position)
        file.write(struct.pack("<I", number ^ 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _adapter(folder: Path, *, scale: float) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "num_layers": 2}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), {"lora_a": mx.full((64, 4), scale)})
    return folder


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=4))


def _edit_tensor(folder: Path, name: str, edit: Callable[[mx.array], mx.array]) -> None:
    path = folder / "model.safetensors"
    loaded: Any = mx.load(str(path))
    weights = {key: mx.array(value) for key, value in loaded.items()}
    weights[name] = edit(weights[name])
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def test_a_copy_elsewhere_has_the_same(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", name="here")
    copy = tmp_path / "there" / "under another name"
    shutil.copytree(folder, copy)
    _edit_config(copy, _name_or_path="/somewhere/else")
    assert _of(copy) == _of(folder)
    assert len(_of(folder).value) == 32


def test_names_of_shards_do_not_matter(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", shard_count=2)
    before = _of(folder)
    first, second = sorted(folder.glob("model*.safetensors"))
    first.rename(folder / "model-z.safetensors")
    second.rename(folder / "model-a.safetensors")
    assert _of(folder) == before


def test_requantizing_in_place_changes_it(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    seen = {_of(folder).value}
    for bits in (8, 4):
        assert tiny_model_dir(tmp_path, "llama", quantize_bits=bits) == folder
        seen.add(_of(folder).value)
    tiny_model_dir(tmp_path, "llama", quantize_bits=4, seed=1)
    seen.add(_of(folder).value)
    assert len(seen) == 4
    assert _of(folder).details["quantization"] == "4-bit, group 32"


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_proj.weight", "model.norm.weight"])
def test_one_changed_tensor_of_equal_shape_changes_it(tmp_path: Path, name: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    _edit_tensor(folder, name, lambda weight: weight)
    before = _of(folder)
    size_bytes = (folder / "model.safetensors").stat().st_size
    _edit_tensor(folder, name, lambda weight: weight * 1.0001)
    assert (folder / "model.safetensors").stat().st_size == size_bytes
    assert _of(folder).value != before.value


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"kv_format": "affine 4-bit, group 64"},
        {"block_token_count": 128},
    ],
)
def test_every_setting_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    assert _of(folder, **changes).value != _of(folder).value


def test_config_counts_but_its_formatting_does_not(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    before = _of(folder)
    _edit_config(folder)
    assert _of(folder) == before
    _edit_config(folder, rope_theta=20000.0)
    assert _of(folder).value != before.value


def test_the_adapter_counts(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    one, two = (_adapter(tmp_path / f"adapter {scale}", scale=scale) for scale in (1.0, 2.0))
    values = {_of(folder, adapter_dir=adapter).value for adapter in (None, one, two)}
    assert len(values) == 3
    assert _of(folder).details["adapter"] == "none"


def test_the_folders_own_code_counts(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    _edit_config(folder, model_file="arch.py")
    (folder / "arch.py").write_text("A = 1\n")
    before = _of(folder)
    (folder / "arch.py").write_text("A = 20\n")
    assert _of(folder).value != before.value


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    spoil(folder)
    with pytest.raises(ModelError, match=str(tmp_path)) as caught:
        _of(folder)
    assert caught.value.reason is Reason.MODEL_INVALID


@pytest.mark.parametrize("at", [0.0, 0.2, 0.4, 0.6, 0.8, 0.999])
def test_one_float_changed_in_place_is_another_model(tmp_path: Path, at: float) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    before = _of(folder)
    change_one_float(folder / "model.safetensors", at=at)
    assert _of(folder).value != before.value
    change_one_float(folder / "model.safetensors", at=at)
    assert _of(folder).value == before.value


def test_one_float_of_an_adapter_changed_in_place_is_another_model(tmp_path: Path) -> None:
    folder, adapter = tiny_model_dir(tmp_path, "llama"), _adapter(tmp_path / "adapter", scale=1.0)
    before = _of(folder, adapter_dir=adapter), adapter_digest(adapter)
    change_one_float(adapter / "adapters.safetensors", at=0.9)
    assert _of(folder, adapter_dir=adapter).value != before[0].value
    assert adapter_digest(adapter) != before[1]


def test_the_code_counts_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    before = _of(folder), _of(folder, book=None)
    told = {name for name in before[0].details if name.startswith(CODE_DETAIL)}
    assert {f"{CODE_DETAIL}{name}" for name in ("mlx_lm.models.llama", "mlx", "icehouse")} <= told
    monkeypatch.setattr(kv_code, "OWN_VERSION", kv_code.OWN_VERSION + 1)
    after = _of(folder), _of(folder, book=None)
    assert all(old.value != new.value for old, new in zip(before, after, strict=True))


def test_the_code_of_lora_layers_is_a_part_of_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _adapter(tmp_path / "adapter", scale=1.0)
    before = adapter_digest(adapter)
    assert adapter_digest(adapter) == before
    monkeypatch.setattr(fingerprint, "adapter_code_digest", lambda: "other code")
    assert adapter_digest(adapter) != before


def test_adapters_that_samples_take_for_one_have_roots_of_their_own(tmp_path: Path) -> None:
    """Without an SSD tier the model's own fingerprint is over samples: it names one model in one process.
    What tells its adapters apart is read whole, tier or none."""
    folder, adapter = tiny_model_dir(tmp_path, "llama"), _adapter(tmp_path / "adapter", scale=1.0)
    path = adapter / "adapters.safetensors"
    # Long enough that samples leave something out.
    mx.save_safetensors(str(path), {"layer.lora_a": mx.ones((4096, 512)), "layer.lora_b": mx.zeros((512, 8))})
    before = _of(folder, adapter_dir=adapter, book=None).value, adapter_digest(adapter)
    change_one_float(path, at=0.9)
    after = _of(folder, adapter_dir=adapter, book=None).value, adapter_digest(adapter)
    assert after[0] == before[0], "the samples hold the changed float: the test shows nothing"
    roots = {
        root_hash(fingerprint=after[0], tenant=DEFAULT_TENANT, adapter=digest)
        for digest in (before[1], after[1])
    }
    assert len(roots) == 2


def test_the_system_s_digest_changes_with_model_template_device_and_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")

    def digest(model: str = "ab", device: str = "cpu") -> str:
        return system_digest_hex(folder, fingerprint_hex=model, device=device)

    first = digest()
    assert digest() == first and len({first, digest(model="cd"), digest(device="gpu")}) == 3
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = digest()
    assert other != first
    monkeypatch.setattr(fingerprint, "_release", lambda name: f"{name} of tomorrow")
    assert digest() != other


def test_an_adapter_is_a_part_of_what_outputs_depend_on() -> None:
    poet = AdapterInfo(AdapterName("poet"), "lora", AdapterDigest(b"p" * 32), 1, 4)
    info = dataclasses.replace(MODEL_INFO, adapters=(poet,))
    assert info.system_fingerprint(NO_ADAPTER) == MODEL_INFO.system_fingerprint(NO_ADAPTER)
    assert info.system_fingerprint(poet.name) != info.system_fingerprint(NO_ADAPTER)
    assert len(info.system_fingerprint(poet.name)) == 16
