"""A model folder is data: whatever it says, none of its code runs unless the operator says so."""

from __future__ import annotations

import builtins
import importlib.metadata
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn
import pytest
from icehouse_server.engine.runner import mlx_lm, model_loader
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer, sees_images
from icehouse_server.errors import ModelError, Reason

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.at_once import load

_RAN = "ran"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a good model's folder with Python beside it that leaves a mark when it runs."""
    made = tiny_model_dir(tmp_path, "llama")
    mark = f"from pathlib import Path\nPath({str(tmp_path / _RAN)!r}).touch()\n"
    (made / "evil.py").write_text(mark + "class EvilTokenizer: ...\nclass Model: ...\nclass ModelArgs: ...\n")
    return made


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who says yes to every question on the terminal; the answer must not matter."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


def test_a_model_that_brings_its_own_class_is_refused(folder: Path) -> None:
    rewrite(folder / "config.json", lambda config: config.update(model_file="evil.py"))
    with pytest.raises(ModelError) as caught:
        load(ModelSource(folder, "evil"))
    assert caught.value.reason is Reason.MODEL_INVALID
    assert not (folder.parent / _RAN).exists()


@pytest.mark.parametrize("known_class", ["PreTrainedTokenizerFast", "EvilTokenizer"])
def test_a_tokenizer_that_brings_its_own_class_does_not_run(folder: Path, known_class: str) -> None:
    entries = {"auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}, "tokenizer_class": known_class}
    rewrite(folder / "tokenizer_config.json", lambda config: config.update(entries))
    try:
        load_tokenizer(ModelSource(folder, "evil"))
    except ModelError as error:
        assert error.reason is Reason.MODEL_INVALID
    assert not (folder.parent / _RAN).exists()


@pytest.mark.parametrize("kind", ["qwen9_next", "no.such", "../llama", "", "base"])
def test_a_model_type_that_mlx_lm_does_not_know_is_named(folder: Path, kind: Any) -> None:
    rewrite(folder / "config.json", lambda config: config.update(model_type=kind))
    with pytest.raises(ModelError) as caught:
        load(ModelSource(folder, "new"))
    error = caught.value
    version = importlib.metadata.version("mlx-lm")
    assert error.reason is Reason.MODEL_INVALID and "download" not in error.message
    assert repr(kind) in error.message and f"mlx-lm {version}" in error.message
    assert error.metadata == {"model_type": str(kind), "mlx_lm_version": version}


@pytest.mark.parametrize("kind", [7, None, ["llama"]])
def test_a_model_type_is_a_text(folder: Path, kind: Any) -> None:
    rewrite(folder / "config.json", lambda config: config.update(model_type=kind))
    with pytest.raises(ModelError, match="names no model_type"):
        load(ModelSource(folder, "odd"))


def test_a_tokenizer_that_only_a_new_library_reads_is_told_as_its_models_type(folder: Path) -> None:
    rewrite(folder / "config.json", lambda config: config.update(model_type="qwen9_next"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="model_type 'qwen9_next'"):
        load_tokenizer(ModelSource(folder, "new"))


def test_an_incomplete_download_is_said_to_be_one(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="is the download complete"):
        load(ModelSource(folder, "half"))


def test_a_template_cannot_reach_beyond_its_sandbox(folder: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    rewrite(folder / "tokenizer_config.json", lambda config: config.update(chat_template=escape))
    (folder / "chat_template.jinja").write_text(escape)
    wrapper = mlx_lm.read_tokenizer(folder, eos_token_ids=None, trust_remote_code=False)
    with pytest.raises(Exception, match="unsafe"):
        wrapper.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


@pytest.mark.parametrize("missing", ["mlx_vlm", "PIL"])
def test_a_model_that_sees_needs_all_of_the_extra(
    folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"mlx_vlm": object(), "PIL": object()} | {missing: None}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    rewrite(folder / "config.json", lambda config: config.update(model_type="smolvlm", vision_config={}))
    with pytest.raises(ModelError, match=r"pip install -e '\.\[vision\]'"):
        sees_images(folder)
    # Its text is read by mlx-lm too.
    rewrite(folder / "config.json", lambda config: config.update(model_type="qwen2_5_vl"))
    assert not sees_images(folder)
    monkeypatch.undo()
    rewrite(folder / "config.json", lambda config: config.update(model_type="llama"))
    assert not sees_images(folder)


def test_loading_leaves_no_record_of_what_layers_have_drawn(tmp_path: Path) -> None:
    source = ModelSource(tiny_model_dir(tmp_path, "llama"), "llama")
    load(source)
    graph, state = io.StringIO(), cast("list[mx.array]", mx.random.state)
    mx.export_to_dot(graph, *state)
    assert "label" not in graph.getvalue()


def test_a_turn_of_loading_reads_no_more_than_others_can_wait_for(tmp_path: Path) -> None:
    """Rows of other models are decoded between two of them. 32 MiB take some ten milliseconds."""
    written = {f"layers.{number}": mx.zeros((1024, 1024)) for number in range(24)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), written)
    del written
    model = cast("Any", mlx.nn).Module()
    model.layers = cast("dict[str, mx.array]", mx.load(str(tmp_path / "model.safetensors")))
    read_bytes, turns = [mx.get_active_memory()], model_loader._read_weights([model], tmp_path, lambda: False)
    for _ in turns:
        read_bytes.append(mx.get_active_memory())
    assert read_bytes[-1] - read_bytes[0] == 96 << 20
    assert max(after - before for before, after in itertools.pairwise(read_bytes)) <= 32 << 20
