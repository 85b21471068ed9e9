"""The zoo keeps its promises: folders load, text round-trips, logits have no near-ties."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.models import ARCHITECTURES, VOCABULARY_SIZE, build, tiny_model_dir
from tests.models.vocabulary import BOS_ID, EOS_ID, tokenizer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_run_has_no_near_ties_and_varies(architecture: str) -> None:
    model = build(architecture)
    caches = make_prompt_cache(model)
    tokens = mx.array([[BOS_ID, *range(10, 50)]])
    output = []
    for _ in range(12):
        logits = model(tokens, cache=caches)[0, -1]
        ranked = mx.sort(logits)
        assert bool(ranked[-1] - ranked[-2] > 1e-3), "the two best tokens are too close to call"
        output.append(mx.argmax(logits).item())
        tokens = mx.array([[output[-1]]])
    assert len(set(output)) >= 4, f"{architecture} repeats itself: {output}"
    assert EOS_ID not in output


def test_folder_loads_with_tokenizer_and_template(tmp_path: Path) -> None:
    model, wrapped = mlx_lm.load(str(tiny_model_dir(tmp_path, "llama")))[:2]
    prompt = wrapped.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert prompt[0] == BOS_ID and wrapped.eos_token_ids == {EOS_ID}
    assert wrapped.encode("the end")[0] == BOS_ID
    assert model(mx.array([prompt])).shape == (1, len(prompt), VOCABULARY_SIZE)


def test_quantized_shards_load(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", quantize_bits=4, shard_count=2, dtype="bfloat16")
    model, _ = mlx_lm.utils.load_model(folder)
    assert len(list(folder.glob("model*.safetensors"))) == 2
    assert model.layers[0].self_attn.q_proj.bits == 4


@pytest.mark.parametrize("text", ["", "the thing", "日本語 🦊🧊 é\u0301", "\x00\t\r\n", "A" * 50])
def test_any_text_round_trips(text: str) -> None:
    encoded = tokenizer().encode(text)
    assert encoded.ids[0] == BOS_ID
    assert tokenizer().decode(encoded.ids) == text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equal_arguments_give_equal_weights(architecture: str) -> None:
    first, second, other = build(architecture), build(architecture), build(architecture, seed=1)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(first(tokens), second(tokens)).item()
    assert not mx.array_equal(first(tokens), other(tokens)).item()
