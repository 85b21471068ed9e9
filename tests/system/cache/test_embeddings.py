"""Embeddings on tiny models: the vectors of a direct computation, in any company, cut and mended at will."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.events import Finished
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, RequestId
from icehouse_server.domain.request import CacheUse, GenerationRequest, Pooling, Vector, finished
from icehouse_server.domain.sampling import SamplingParams
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from tests.fixtures.models import ARCHITECTURES, tiny_model_dir
from tests.fixtures.models.adapters import adapter_source, tiny_adapter_dir
from tests.system.cache.server import BLOCK, CacheServer

LENGTHS = (1, 2, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 7)


def tokens_of(length: int) -> tuple[int, ...]:
    return tuple(3 + (length * 31 + i * 7) % 290 for i in range(length))


def embedding_request(name: str, length: int, pooling: Pooling, adapter: AdapterName) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        prompt_token_ids=tokens_of(length),
        max_output_tokens=0,
        sampling=SamplingParams(),
        stop=(),
        arrival_time=0.0,
        cache_use=CacheUse.OFF,
        adapter=adapter,
        pooling=pooling,
    )


def vectors_of(served: CacheServer, pooling: Pooling, adapter: AdapterName = NO_ADAPTER) -> list[Vector]:
    """Embed an input of every length together."""
    names = [f"{pooling.name} {adapter} {length}" for length in LENGTHS]
    requests = [
        embedding_request(name, length, pooling, adapter) for name, length in zip(names, LENGTHS, strict=True)
    ]
    served.engine.submit(requests[0], tuple(requests[1:]))
    ends = [served.recorder.wait_for_end(name) for name in names]
    assert all(isinstance(end, Finished) and end.usage.output_token_count == 0 for end in ends), ends
    return [end.embedding for end in ends if isinstance(end, Finished) and end.embedding is not None]


def direct(model_dir: Path, pooling: Pooling, adapter: Path | None = None) -> list[np.ndarray]:
    """Run each input whole, without caches, through mlx-lm's body of the model."""
    model, _ = load_model(model_dir)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
    model.eval()
    whole = getattr(model, "language_model", model)
    body = whole.backbone if hasattr(whole, "backbone") else whole.model
    found = []
    for length in LENGTHS:
        hidden = body(mx.array([tokens_of(length)]))[0].astype(mx.float32)
        found.append(np.array(hidden[-1] if pooling is Pooling.LAST_TOKEN else hidden.mean(axis=0)))
    return found


@pytest.mark.parametrize(
    ("architecture", "is_pipelined"),
    [*((architecture, False) for architecture in ARCHITECTURES), ("llama", True), ("lfm2", True)],
)
def test_vectors_are_those_of_a_direct_computation(
    tmp_path: Path, architecture: str, is_pipelined: bool
) -> None:
    model_dir = tiny_model_dir(tmp_path, architecture)
    with CacheServer(model_dir, None, is_pipelined=is_pipelined) as served:
        assert served.recorder.model.embedding_size == 64
        told = {pooling: vectors_of(served, pooling) for pooling in (Pooling.LAST_TOKEN, Pooling.MEAN)}
    for pooling in told:
        for mine, theirs in zip(told[pooling], direct(model_dir, pooling), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)
    assert not np.allclose(told[Pooling.MEAN][-1], told[Pooling.LAST_TOKEN][-1], atol=0.05)


def test_vectors_and_texts_side_by_side_are_those_of_each_alone(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    with CacheServer(model_dir, None) as served:
        alone = served.ask("alone", tokens_of(40), max_output_tokens=30, cache_use=CacheUse.OFF).tokens
        vectors = vectors_of(served, Pooling.MEAN)
    with CacheServer(model_dir, None) as served:
        for i in range(4):
            served.submit(f"{i}", tokens_of(40), max_output_tokens=30, cache_use=CacheUse.OFF)
        beside = vectors_of(served, Pooling.MEAN)
        assert [served.answer(f"{i}").tokens for i in range(4)] == [alone] * 4
        for mine, theirs in zip(beside, vectors, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_an_adapter_changes_the_vector_as_it_does_in_mlx_lm(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    path = tiny_adapter_dir(tmp_path, model_dir, seed=1)
    adapter = adapter_source("one", path)
    with CacheServer(model_dir, None, adapters=[adapter]) as served:
        plain = vectors_of(served, Pooling.MEAN)
        adapted = vectors_of(served, Pooling.MEAN, adapter.name)
    for mine, theirs in zip(adapted, direct(model_dir, Pooling.MEAN, path), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)
    assert not np.allclose(plain[-1], adapted[-1], atol=0.05)


def test_embeddings_leave_nothing_in_the_cache_and_take_nothing_from_it(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    with CacheServer(model_dir, None) as served:
        first = vectors_of(served, Pooling.MEAN)
        assert len(served.cache.tree) == 0
        served.ask("text", tokens_of(LENGTHS[-1]))
        again = embedding_request("again", LENGTHS[-1], Pooling.MEAN, NO_ADAPTER)
        served.engine.submit(again)
        end = served.recorder.wait_for_end("again")
    assert isinstance(end, Finished) and end.embedding is not None
    assert end.usage.cache.cached_token_count == 0
    # Cut into other chunks and passes, sums differ in their last bits.
    np.testing.assert_allclose(end.embedding, first[-1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 3, 4])
def test_a_vector_is_cut_then_scaled(dimensions: int) -> None:
    vector = np.array([3.0, 4.0, 12.0, 84.0], np.float32)
    cut = finished(vector, dimension_count=dimensions, is_normalized=False)
    assert cut.tolist() == vector.tolist()[:dimensions]
    scaled = finished(vector, dimension_count=dimensions, is_normalized=True)
    assert np.linalg.norm(scaled) == pytest.approx(1.0)
    np.testing.assert_allclose(scaled * np.linalg.norm(cut), cut, rtol=1e-6)


def test_a_vector_of_zeros_has_no_direction_and_stays() -> None:
    assert finished(np.zeros(3, np.float32), dimension_count=3, is_normalized=True).tolist() == [0, 0, 0]
