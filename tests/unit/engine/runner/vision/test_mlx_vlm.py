"""Adapter to mlx-vlm: towers give the vectors that its own models make, and rows have their own positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.kv_cache.regions import array_of
from icehouse_server.engine.runner.model_loader import ModelSource, describe, load_tokenizer

from tests.fixtures.models.at_once import load

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.engine.runner.vision import mlx_vlm  # noqa: E402
from icehouse_server.vision.processor import PreparedImage, open_processor  # noqa: E402

from tests.fixtures.models import pixtral  # noqa: E402
from tests.fixtures.models.vision import tiny_vision_dir  # noqa: E402
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE  # noqa: E402

MARK, BREAK = VOCABULARY_SIZE, VOCABULARY_SIZE + 1


@pytest.fixture(scope="module", params=["pixtral", "mistral3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_dir(tmp_path_factory.mktemp("models"), request.param)


def prepared(folder: Path, width: int, height: int) -> tuple[PreparedImage, list[int]]:
    """Return an image and the tokens of its span: rows, and a break between two."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    made = open_processor(folder, folder.name).prepare(Image.fromarray(pixels))
    rows = made.text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
    ids = [id for row in rows for id in (*[MARK] * row.count("[IMG]"), BREAK)][:-1]
    assert ids.count(MARK) == made.image.feature_count
    return made, ids


@pytest.mark.parametrize("size", [(60, 40), (9, 31), (3, 2)])
def test_a_tower_without_mask_gives_the_vectors_of_mlx_vlm(folder: Path, size: tuple[int, int]) -> None:
    text, tower, _ = mlx_vlm.read_model(folder, lazy=False)
    made, ids = prepared(folder, *size)
    tensors = {tensor.name: array_of(tensor) for tensor in made.image.tensors}
    run = tower.begin(ids, tensors)
    from mlx_vlm.utils import load_model

    whole: Any = load_model(folder)
    expected = whole.get_input_embeddings(mx.array([ids]), **tensors).inputs_embeds[0]
    assert run.vectors.shape == expected.shape
    assert mx.allclose(run.vectors, expected, atol=1e-5).item()
    words = mx.array([place for place, id in enumerate(ids) if id == BREAK], mx.int32)
    if words.size:
        embedded = text.language_model.model.embed_tokens(mx.array([BREAK]))
        assert mx.array_equal(run.vectors[words], mx.broadcast_to(embedded, (words.size, embedded.shape[1])))


def test_a_layer_before_the_last_is_taken_where_the_folder_says_so(folder: Path, tmp_path: Path) -> None:
    earlier = tiny_vision_dir(tmp_path, folder.name)
    change(earlier, vision_feature_layer=-2)
    from mlx_vlm.utils import load_model

    made, ids = prepared(earlier, 60, 40)
    tensors = {tensor.name: array_of(tensor) for tensor in made.image.tensors}
    _, tower, _ = mlx_vlm.read_model(earlier, lazy=False)
    run = tower.begin(ids, tensors)
    whole: Any = load_model(earlier)
    expected = whole.get_input_embeddings(mx.array([ids]), **tensors).inputs_embeds[0]
    _, whole_tower, config = mlx_vlm.read_model(folder, lazy=False)
    attended = [
        len([piece for piece in each.slices if piece.kind == "attention"])
        for each in (whole_tower.begin(ids, tensors), run)
    ]
    assert attended == [config["vision_config"]["num_hidden_layers"] - skipped for skipped in (0, 1)]
    assert mx.allclose(run.vectors, expected, atol=1e-5).item()


def test_each_row_of_a_ministral_has_the_factor_of_its_own_position(tmp_path: Path) -> None:
    from mlx_vlm.models.cache import BatchKVCache

    text, _, _ = mlx_vlm.read_model(tiny_vision_dir(tmp_path, "ministral3"), lazy=False)
    long, short = [list(range(9, 9 + count)) for count in (40, 3)]
    alone = []
    for ids in (long, short):
        caches = text.make_cache()
        text(mx.array([ids]), cache=caches)
        alone.append(text(mx.array([[7]]), cache=caches))
    # Rows of a batch are filled up on the left, so that their offsets differ.
    together = [BatchKVCache([0, len(long) - len(short)]) for _ in text.layers]
    text(mx.array([long, [0] * (len(long) - len(short)) + short]), cache=together)
    both = text(mx.array([[7], [7]]), cache=together)
    assert together[0].offset.tolist() == [len(long) + 1, len(short) + 1]
    assert mx.allclose(both, mx.concatenate(alone), atol=1e-4).item()


def test_the_base_of_rope_is_read_where_transformers_writes_it(folder: Path, tmp_path: Path) -> None:
    text = pixtral.pixtral_config()["text_config"]
    old, new = (tiny_vision_dir(tmp_path / name, folder.name) for name in ("old", "new"))
    change(old, text_config={**text, "rope_theta": 500.0})
    del text["rope_theta"]
    rope = {"rope_type": "default", "rope_theta": 500.0}
    change(new, text_config={**text, "rope_parameters": rope})
    ids = mx.array([list(range(9, 49))])
    first, second, other = (mlx_vlm.read_model(each, lazy=False)[0](ids) for each in (old, new, folder))
    assert mx.array_equal(first, second).item() and not mx.allclose(first, other, atol=1e-2).item()
    change(new, text_config={**text, "rope_parameters": {**rope, "rope_type": "yarn"}})
    with pytest.raises(ValueError, match="'yarn'; only `default` is supported"):
        mlx_vlm.read_model(new, lazy=True)


def change(folder: Path, **facts: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


def refusal(folder: Path) -> str | None:
    return mlx_vlm.refusal(folder, json.loads((folder / "config.json").read_text()))


def test_what_is_not_served_with_images_says_why_and_is_not_loaded_from_here(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "mistral3")
    assert refusal(folder) is None
    served = pixtral.mistral3_config()
    change(folder, vision_feature_layer=[-1, -2])
    assert "several layers of its tower ([-1, -2])" in str(refusal(folder))
    change(folder, vision_feature_layer=-1, text_config={**served["text_config"], "model_type": "mistral4"})
    assert "text model is a mistral4" in str(refusal(folder))
    assert not mlx_vlm.is_used(folder, json.loads((folder / "config.json").read_text()))
    change(folder, model_type="llama")
    assert refusal(folder) == "reads only text"


@pytest.mark.parametrize("has_index", [False, True])
def test_a_folder_that_was_converted_without_its_tower_is_mlx_lms(tmp_path: Path, has_index: bool) -> None:
    folder = tiny_vision_dir(tmp_path, "mistral3")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if name.startswith("language_model.")}
    mx.eval(kept)
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    if has_index:
        index = {"weight_map": dict.fromkeys(kept, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    source = ModelSource(folder, "tiny")
    loaded = load(source)
    told = describe(loaded, source, load_tokenizer(source), "")
    assert loaded.tower is None and not told.sees_images
    assert told.image_refusal == refusal(folder) and "no vision tower weights" in told.image_refusal
    (folder / "model.safetensors").write_bytes(b"\xff" * 99)
    assert (refusal(folder) is None) is not has_index, "whoever loads it says that it is damaged"


@pytest.mark.parametrize(("family", "is_whole"), [("gemma3", True), ("smolvlm", False)])
def test_a_model_s_facts_say_whether_images_run_whole(tmp_path: Path, family: str, is_whole: bool) -> None:
    source = ModelSource(path=tiny_vision_dir(tmp_path, family), model_id="tiny")
    info = describe(load(source), source, load_tokenizer(source), "")
    assert (info.sees_images, info.runs_images_whole) == (True, is_whole)
