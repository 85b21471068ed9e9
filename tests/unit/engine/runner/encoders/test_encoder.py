"""Encoders against transformers' own numbers, in any company, and folders that are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.model import ModelKind
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.encoders import encoder
from icehouse_server.engine.runner.encoders.encoder import Encoder, encoder_classes
from icehouse_server.engine.runner.encoders.recipe import Gather, VectorRecipe
from icehouse_server.engine.runner.model_loader import ModelSource
from icehouse_server.errors import ModelError
from mlx_lm.utils import load_model

from tests.fixtures.models import at_once, tiny_model_dir
from tests.fixtures.models.encoders import (
    ENCODER_CONFIGS,
    SCORING,
    dense_arrays,
    encoder_config,
    encoder_weights,
    save_arrays,
    tiny_encoder_dir,
    write_json,
)
from tests.unit.engine.runner.encoders.transformers_run import texts, tiny_encoders

EXPECTED = json.loads((Path(__file__).parent / "transformers.json").read_text(encoding="utf-8"))
NAMES = [*ENCODER_CONFIGS, *(f"{kind} scores" for kind in SCORING)]


def load(folder: Path) -> Encoder:
    model, _ = load_model(folder, get_model_classes=encoder_classes(folder))
    assert isinstance(model, Encoder)
    return model


def gathered(model: Encoder, gather: Gather, inputs: list[list[int]]) -> np.ndarray:
    model._recipe = dataclasses.replace(model._recipe, gather=gather)
    return np.array(model(inputs))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_encoders(tmp_path_factory.mktemp("encoders"))


def test_every_kind_is_tried() -> None:
    assert {*encoder._FAMILIES, "gemma3_text"} == set(ENCODER_CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    model = load(folders[name])
    expected = np.array(EXPECTED[name])
    found = (
        [np.array(model(texts()))]
        if model.has_head
        else [gathered(model, each, texts()) for each in (Gather.FIRST, Gather.LAST, Gather.MEAN)]
    )
    np.testing.assert_allclose(np.stack(found, axis=1), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_comes_to_the_same_in_any_company(folders: dict[str, Path], name: str) -> None:
    model = load(folders[name])
    random = np.random.default_rng(1)
    inputs = [random.integers(5, 300, n).tolist() for n in (1, 1, 2, 3, 3, 3, 17, 64, 513)]
    together = np.array(model(inputs))
    alone = np.concatenate([np.array(model([text])) for text in inputs])
    # Products of more rows are rounded otherwise on some processors.
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=1e-5)


def test_dense_layers_follow_the_pooling_wherever_their_weights_are(tmp_path: Path) -> None:
    folder = tiny_encoder_dir(tmp_path, "gemma3_text", pooling="mean", dense=(48, 16))
    model = load(folder)
    plain = load(tiny_encoder_dir(tmp_path, "gemma3_text", pooling="mean", name="plain"))
    expected = np.array(plain(texts()))
    layers = dense_arrays((32, 48, 16), seed=0)
    for layer in layers:
        expected = expected @ layer["linear.weight"].T
    assert model.vector_size == 16
    np.testing.assert_allclose(np.array(model(texts())), expected, atol=1e-5, rtol=1e-5)
    # As conversions to MLX have them: beside the others.
    weights = encoder_weights(encoder_config("gemma3_text"))
    weights |= {f"dense.{index}.weight": layer["linear.weight"] for index, layer in enumerate(layers)}
    save_arrays(folder / "model.safetensors", weights)
    for path in folder.glob("*_Dense/model.safetensors"):
        path.unlink()
    np.testing.assert_allclose(np.array(load(folder)(texts())), expected, atol=1e-5, rtol=1e-5)


def test_a_quantized_folder_is_near_the_whole_one(tmp_path: Path) -> None:
    folder = tiny_encoder_dir(tmp_path, "bert", pooling="cls")
    whole = np.array(load(folder)(texts()))
    weights = {name: mx.array(array) for name, array in encoder_weights(encoder_config("bert")).items()}
    for name in [name for name, array in weights.items() if "encoder" in name and array.shape[-1:] == (32,)]:
        if weights[name].ndim == 2:
            packed, scales, biases = mx.quantize(weights[name], group_size=32, bits=8)
            stem = name.removesuffix("weight")
            weights |= {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    quantization = {"group_size": 32, "bits": 8}
    write_json(folder / "config.json", encoder_config("bert", quantization=quantization))
    found = np.array(load(folder)(texts()))
    assert np.abs(found - whole).max() < 0.2 and not np.array_equal(found, whole)


Change = Callable[[Path, dict[str, Any]], None]


def config_with(**values: Any) -> Change:
    def change(folder: Path, config: dict[str, Any]) -> None:
        write_json(folder / "config.json", {**config, **values})

    return change


def file_with(name: str, value: object) -> Change:
    def change(folder: Path, config: dict[str, Any]) -> None:
        write_json(folder / name, value)

    return change


def text_in(name: str, text: str) -> Change:
    def change(folder: Path, config: dict[str, Any]) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return change


def without_tensor(folder: Path, config: dict[str, Any]) -> None:
    weights = encoder_weights(config)
    del weights["encoder.layer.1.output.dense.bias"]
    save_arrays(folder / "model.safetensors", weights)


def with_tensor(folder: Path, config: dict[str, Any]) -> None:
    weights = encoder_weights(config)
    save_arrays(folder / "model.safetensors", {**weights, "adapter.weight": np.zeros((2, 2), np.float32)})


def steps(*listed: tuple[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in listed]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (config_with(hidden_size="wide"), "hidden_size"),
        (config_with(num_hidden_layers=None), "num_hidden_layers"),
        (config_with(num_attention_heads=5), "not a multiple of 5 heads"),
        (config_with(hidden_act="swish_of_old"), "swish_of_old"),
        (config_with(position_embedding_type="relative_key"), "relative_key"),
        (config_with(is_decoder=True), "is_decoder"),
        (
            config_with(architectures=["BertForSequenceClassification"], id2label={"0": "a", "1": "b"}),
            "2 classes",
        ),
        (config_with(intermediate_size=64), "layers.0.up"),
        (without_tensor, "layers.1.down.bias"),
        (with_tensor, "adapter.weight"),
        (text_in("modules.json", "{"), "Expecting"),
        (text_in("modules.json", "{}"), "list of steps"),
        (file_with("modules.json", steps(("../elsewhere", "Pooling"))), "'../elsewhere'"),
        (file_with("modules.json", steps(("", "Transformer"), ("1_CNN", "CNN"))), "'CNN'"),
        (
            file_with("modules.json", steps(("", "MLMTransformer"), ("1_x", "SpladePooling"))),
            "'MLMTransformer'",
        ),
        (file_with("modules.json", steps(("1_None", "Pooling"))), "1_None"),
        (file_with("1_Pooling/config.json", {"pooling_mode_max_tokens": True}), "max"),
        (file_with("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}), "cls"),
        (
            file_with("1_Pooling/config.json", {"pooling_mode": "cls", "include_prompt": False}),
            "include_prompt",
        ),
        (file_with("2_Dense/config.json", {"in_features": 32, "out_features": 0}), "out_features"),
        (
            file_with("2_Dense/config.json", {"in_features": 31, "out_features": 16, "bias": False}),
            "takes 31",
        ),
        (file_with("config_sentence_transformers.json", {"default_prompt_name": "x"}), "'x'"),
    ],
)
def test_what_is_damaged_or_not_known_is_refused_by_name(tmp_path: Path, change: Change, told: str) -> None:
    folder = tiny_encoder_dir(tmp_path, "bert", pooling="mean", dense=(16,))
    change(folder, encoder_config("bert"))
    source = ModelSource(folder, "tiny")
    with pytest.raises(ModelError) as caught:
        model_loader.describe(
            at_once.load(source), source, model_loader.load_tokenizer(source), fingerprint_hex=""
        )
    assert told in caught.value.message and str(folder) in caught.value.message


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("modernbert", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, "RoPE is scaled"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "RoPE is scaled"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
    ],
)
def test_a_family_refuses_what_it_does_not_compute(
    tmp_path: Path, kind: str, values: dict[str, Any], told: str
) -> None:
    folder = tiny_encoder_dir(tmp_path, kind, **values)
    with pytest.raises(ModelError, match=told):
        at_once.load(ModelSource(folder, "tiny"))


def test_a_decoder_with_steps_of_encoders_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    write_json(folder / "modules.json", steps(("", "Transformer"), ("1_Pooling", "Pooling")))
    source = ModelSource(folder, "tiny")
    loaded, tokenizer = at_once.load(source), model_loader.load_tokenizer(source)
    with pytest.raises(ModelError, match="encoders only"):
        model_loader.describe(loaded, source, tokenizer, fingerprint_hex="")


def test_a_decoder_or_a_head_that_scores_needs_no_steps(tmp_path: Path) -> None:
    decoder = tiny_model_dir(tmp_path, "qwen3")
    head = tiny_encoder_dir(tmp_path, "bert", scores=True)
    for folder, kind in ((decoder, ModelKind.CHAT), (head, ModelKind.RERANK)):
        write_json(folder / "modules.json", steps(("", "Transformer"), ("1_LogitScore", "LogitScore")))
        source = ModelSource(folder, "tiny")
        loaded, tokenizer = at_once.load(source), model_loader.load_tokenizer(source)
        assert model_loader.describe(loaded, source, tokenizer, fingerprint_hex="").kind is kind


@pytest.mark.parametrize(("wanted", "limit"), [(None, 600), (100, 100), (5000, 1100)])
def test_a_text_is_as_long_as_asked_or_trained_and_never_more_than_there_are_positions(
    tmp_path: Path, wanted: int | None, limit: int
) -> None:
    model = load(tiny_encoder_dir(tmp_path, "bert"))
    model._recipe = VectorRecipe(gather=Gather.MEAN, token_limit=600)
    assert model.context_token_limit(wanted) == limit
