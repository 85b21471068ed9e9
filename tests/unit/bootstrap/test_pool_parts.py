"""Several models: what each is called, that none is called like another, and what each will take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse_server.bootstrap.composition import CPU_DEFAULTS
from icehouse_server.bootstrap.model_source import locate_model, served_name
from icehouse_server.bootstrap.pool_parts import build_pool, check_names
from icehouse_server.bootstrap.room import MachineResources, held_bytes
from icehouse_server.clock import SystemClock
from icehouse_server.config import ModelConfig
from icehouse_server.config.sections import PooledModelConfig
from icehouse_server.device import find_device
from icehouse_server.engine.runner.model_loader import ModelSource, parameters_of
from icehouse_server.errors import CannotFit, ConfigError, StartError
from icehouse_server.pool.places import ModelTerms
from icehouse_server.rpc.access.caller import UNPROVED

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.at_once import load
from tests.system.models.pool_server import entry, pool_config, pool_server


def test_a_model_is_called_as_it_is_once_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert served_name(ModelConfig(model=str(tmp_path / "mine"))) == "mine"
    assert served_name(ModelConfig(model=str(tmp_path / "absent"))) == "absent"
    assert served_name(ModelConfig(model="org/name")) == "org/name"
    assert served_name(ModelConfig(model="demo")) == "smollm2-135m-instruct"
    assert served_name(ModelConfig(model="org/name", model_name="short")) == "short"


@pytest.mark.parametrize(
    "terms",
    [
        [ModelTerms("a"), ModelTerms("a")],
        [ModelTerms("a"), ModelTerms("b", aliases=("a",))],
        [ModelTerms("a", aliases=("c",)), ModelTerms("b", aliases=("c",))],
        [ModelTerms("a", aliases=("a",))],
    ],
)
def test_a_name_is_one_models(terms: list[ModelTerms]) -> None:
    with pytest.raises(ConfigError, match="names more than one model, or one twice"):
        check_names(terms)
    check_names([ModelTerms("a", aliases=("b",)), ModelTerms("c")])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_a_model_takes_is_known_before_it_is_loaded(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Where weights are widened, their files are smaller."""
    folder = tiny_model_dir(tmp_path, architecture, dtype)
    async with pool_server(tmp_path / "blocks", [entry(folder, dtype="float32")]) as served:
        needs = served.pool._opener.locate(architecture)
        info = served.pool.find("", UNPROVED).info
    assert info is not None
    assert info.resident_bytes <= needs.weight_bytes <= 1.01 * info.resident_bytes
    assert needs.run_bytes >= CPU_DEFAULTS.prefill_chunk_token_count * info.kv_bytes_per_token


async def test_a_model_that_is_not_here_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = entry(tiny_model_dir(tmp_path, "llama"))
    others = (
        entry(tmp_path / "nowhere"),
        PooledModelConfig(model="org/name"),
        PooledModelConfig(model="demo"),
    )
    config = pool_config(tmp_path / "blocks", [here, *others])
    build_pool(config, device=find_device(), clock=SystemClock())
    told = [record for record in caplog.records if record.message == "model_not_here"]
    assert [vars(record)["model"] for record in told] == ["nowhere"]


async def test_a_draft_model_counts_beside_its_model_before_anything_is_fetched(tmp_path: Path) -> None:
    folder, draft = (tiny_model_dir(tmp_path, "llama", name=name) for name in ("large", "draft"))
    both_bytes = held_bytes(folder, dtype="float32") + held_bytes(draft, dtype="float32")
    guessed = entry(folder, draft_model=str(draft))
    limits = {"engine__memory_limit_bytes": both_bytes - 1, "server__port": 0}
    config = pool_config(tmp_path / "blocks", [guessed], **limits)
    served = build_pool(config, device=find_device(), clock=SystemClock())
    assert served.pool is not None
    with pytest.raises(CannotFit, match="draft") as refused:
        served.pool._opener.locate("large")
    assert str(tmp_path) not in refused.value.message


@pytest.mark.parametrize(
    ("stored", "said", "wanted"),
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float32", "bfloat16"),
        ("float16", "bfloat16", "float32"),
    ],
)
async def test_the_files_count_and_not_what_is_said_of_them(
    tmp_path: Path, stored: str, said: str, wanted: str
) -> None:
    folder = tiny_model_dir(tmp_path, "llama", stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": said}))
    loaded = load(ModelSource(folder, "llama", dtype=wanted))
    assert held_bytes(folder, dtype=wanted) == sum(array.nbytes for _, array in parameters_of(loaded.model))


@pytest.mark.parametrize("wanted", ["", "float32"])
def test_quantized_weights_count_as_they_are(tmp_path: Path, wanted: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama", "bfloat16", quantize_bits=4, shard_count=2)
    loaded = load(ModelSource(folder, "llama", dtype=wanted))
    assert held_bytes(folder, dtype=wanted) == sum(array.nbytes for _, array in parameters_of(loaded.model))


def test_a_tower_beside_quantized_weights_is_widened(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    from tests.fixtures.models.vision import tiny_vision_dir

    folder = tiny_vision_dir(tmp_path, "qwen2_5_vl")
    (file,) = folder.glob("*.safetensors")
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(file)).items()}
    for name in [name for name in weights if re.match(r"language_model.*proj\.weight", name)]:
        layer = name.removesuffix(".weight")
        parts = mx.quantize(weights[name], group_size=32, bits=4)
        weights |= zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    loaded = load(ModelSource(folder, "sees", dtype="float32"))
    held = [array for part in (loaded.model, loaded.tower) for _, array in parameters_of(part)]
    assert {array.dtype for array in held} == {mx.uint32, mx.bfloat16, mx.float32}
    actual_bytes = sum(array.nbytes for array in held)
    assert actual_bytes <= held_bytes(folder, dtype="float32") <= 1.01 * actual_bytes


def test_files_that_say_nothing_of_their_weights_count_as_they_are(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", "bfloat16")
    (weights,) = folder.glob("*.safetensors")
    for damaged in (weights.read_bytes()[:1000], b"", b"\x02" + bytes(7) + b"[]"):
        weights.write_bytes(damaged)
        assert held_bytes(folder, dtype="float32") == len(damaged)


def test_a_model_that_only_its_files_let_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", "bfloat16")
    config = ModelConfig(model=str(folder))
    room = MachineResources(memory_limit_bytes=held_bytes(folder, dtype="float32") - 1)
    locate_model(config, on_progress=lambda *_: None, on_size=room.check)
    with pytest.raises(StartError, match="in memory"):
        locate_model(config, on_progress=lambda *_: None, on_size=room.check, dtype="float32")
