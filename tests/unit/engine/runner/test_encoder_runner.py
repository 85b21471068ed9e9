"""Encoder runner: whole prompts in any order, numbers that are none, memory within its estimate, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import Pooling
from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.encoder_runner import EncoderRunner
from icehouse_server.engine.runner.runner import RunnerSettings
from icehouse_server.errors import ModelError, Reason

from tests.fixtures.engine import load_at_once
from tests.fixtures.models.adapters import adapter_source
from tests.fixtures.models.encoders import encoder_config, encoder_weights, save_arrays, tiny_encoder_dir


def runner_of(folder: Path, **source: Any) -> EncoderRunner:
    given = model_loader.ModelSource(folder, "tiny", **source)
    return EncoderRunner(
        source=given,
        tokenizer=model_loader.load_tokenizer(given),
        settings=RunnerSettings(),
        clock=SystemClock(),
    )


def chunk(number: int, length: int) -> Chunk:
    return Chunk(SequenceId(number), [5 + i % 90 for i in range(length)], pooling=Pooling.OWN)


def test_each_prompt_gets_its_own_vector_in_whatever_order_they_come(tmp_path: Path) -> None:
    runner = runner_of(tiny_encoder_dir(tmp_path, "modernbert", pooling="cls"))
    info = load_at_once(runner)
    chunks = [chunk(number, length) for number, length in enumerate((40, 3, 700, 3, 1))]
    together = runner.run(chunks).pooled
    for each in chunks:
        alone = runner.run([each]).pooled[each.sequence_id]
        np.testing.assert_allclose(together[each.sequence_id], alone, atol=1e-5)
    assert info.runs_whole and (info.embedding_size, info.kv_bytes_per_token) == (32, 0)
    assert not runner.run([]).pooled
    runner.close()


def test_numbers_that_are_none_fail_their_own_text_alone(tmp_path: Path) -> None:
    folder = tiny_encoder_dir(tmp_path, "bert", pooling="mean")
    weights = encoder_weights(encoder_config("bert"))
    weights["embeddings.word_embeddings.weight"][300] = np.nan
    save_arrays(folder / "model.safetensors", weights)
    runner = runner_of(folder)
    load_at_once(runner)
    damaged = Chunk(SequenceId(1), [7, 300, 7], pooling=Pooling.OWN)
    result = runner.run([chunk(0, 3), damaged])
    assert list(result.pooled) == [SequenceId(0)]
    [failed] = result.drawn
    assert failed.sequence_id == 1 and failed.error is not None
    assert failed.error.reason is Reason.LOGITS_NOT_FINITE
    runner.close()


@pytest.mark.parametrize("lengths", [(1000,), (512, 512), (17,) * 60])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "gemma3_text"])
def test_a_pass_takes_no_more_than_its_estimate(tmp_path: Path, kind: str, lengths: tuple[int, ...]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    if kind == "gemma3_text":
        sizes |= {"num_key_value_heads": 2, "head_dim": 32}
    runner = runner_of(tiny_encoder_dir(tmp_path, kind, pooling="mean", **sizes))
    load_at_once(runner)
    chunks = [chunk(number, length) for number, length in enumerate(lengths)]
    runner.run([chunk(0, 1)])  # what a first pass makes and keeps
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    runner.run(chunks)
    taken = mx.get_peak_memory() - before
    model = runner.memory_model()
    estimate = sum(model.chunk_bytes(chunk_token_count=n, context_token_count=n) for n in lengths)
    assert taken <= estimate, (taken / estimate, taken)
    runner.close()


@pytest.mark.parametrize("as_part", [True, False])
def test_adapters_are_refused(tmp_path: Path, as_part: bool) -> None:
    folder = tiny_encoder_dir(tmp_path, "bert")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_arrays(tmp_path / "adapter" / "adapters.safetensors", {"a": np.zeros(1, np.float32)})
    adapter = tmp_path / "adapter"
    source = {"adapter_path": str(adapter)} if as_part else {"adapters": (adapter_source("a", adapter),)}
    with pytest.raises(ModelError, match="without them"):
        load_at_once(runner_of(folder, **source))
