"""Encoders in a whole server: vectors and scores as their folders say, and what else is asked of them."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from icehouse.v1 import cache_service_pb2 as cache_messages
from icehouse.v1 import embedding_service_pb2 as embedding
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import model_service_pb2 as models
from icehouse.v1 import rerank_service_pb2 as reranking
from icehouse.v1.server_service_pb2 import GetStatsRequest
from icehouse_server.engine.runner.encoders.encoder import Encoder, encoder_classes
from icehouse_server.errors import Reason
from mlx_lm.utils import load_model

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.encoders import encoder_tokenizer, tiny_encoder_dir, write_json
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.stubs import done
from tests.fixtures.whole_server import whole_server

TEXTS = ("Ice.", "The ice house stands by the lake. " * 5, "a", "Straw keeps it cold.", "a")


def direct(folder: Path, texts: list[list[int]]) -> np.ndarray:
    """Compute each text by itself."""
    model, _ = load_model(folder, get_model_classes=encoder_classes(folder))
    assert isinstance(model, Encoder)
    return np.concatenate([np.array(model([text])) for text in texts])


def scaled(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "pooling", "dense"),
    [("bert", "cls", ()), ("modernbert", "mean", ()), ("gemma3_text", "mean", (48, 16))],
)
async def test_vectors_are_those_of_each_text_alone_in_any_company(
    tmp_path: Path, kind: str, pooling: str, dense: tuple[int, ...]
) -> None:
    folder = tiny_encoder_dir(tmp_path, kind, pooling=pooling, dense=dense)
    token_ids = [encoder_tokenizer().encode(text).ids for text in TEXTS]
    request = embedding.EmbedRequest(inputs=[embedding.EmbedInput(text=text) for text in TEXTS])
    async with whole_server(folder, tmp_path / "blocks") as served:
        answers = await asyncio.gather(*(served.embeddings.Embed(request) for _ in range(8)))
        model = (await served.models.GetModel(models.GetModelRequest())).model
    expected = scaled(direct(folder, token_ids))
    for answer in answers:
        assert [each.prompt_tokens for each in answer.embeddings] == [len(ids) for ids in token_ids]
        found = np.array([list(each.values) for each in answer.embeddings])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (model.kind, model.architecture) == (models.MODEL_KIND_EMBEDDING, kind)
    assert model.embedding_dimensions == expected.shape[1]
    assert not (tmp_path / "blocks").exists(), "an encoder keeps nothing"


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
async def test_a_head_ranks_documents_by_its_score_of_the_pair(tmp_path: Path, kind: str) -> None:
    folder = tiny_encoder_dir(tmp_path, kind, scores=True)
    pairs = [encoder_tokenizer().encode("What keeps ice?", text).ids for text in TEXTS]
    request = reranking.RerankRequest(query="What keeps ice?", documents=TEXTS)
    async with whole_server(folder, tmp_path / "blocks") as served:
        answer = await served.reranking.Rerank(request)
        model = (await served.models.ListModels(models.ListModelsRequest())).models[0]
    expected = direct(folder, pairs)[:, 0]
    told = {result.index: result.log_odds for result in answer.results}
    assert [told[index] for index in range(len(TEXTS))] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [result.index for result in answer.results] == sorted(told, key=lambda i: (-told[i], i))
    scores = 1 / (1 + np.exp(-np.array([result.log_odds for result in answer.results])))
    assert [result.score for result in answer.results] == pytest.approx(scores.tolist())
    assert {r.index: r.prompt_tokens for r in answer.results} == {i: len(ids) for i, ids in enumerate(pairs)}
    assert (model.kind, answer.cached_tokens) == (models.MODEL_KIND_RERANK, 0)


async def test_a_text_as_long_as_the_context_is_embedded_and_a_longer_one_refused(tmp_path: Path) -> None:
    folder = tiny_encoder_dir(tmp_path, "bert", pooling="mean")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 600})
    async with whole_server(folder, tmp_path / "blocks") as served:
        request = embedding.EmbedRequest()
        request.inputs.add(tokens={"ids": [7] * 600})
        [whole] = (await served.embeddings.Embed(request)).embeddings
        request.inputs.add(tokens={"ids": [7] * 601})
        longer = await refused(served.embeddings.Embed(request))
    assert len(whole.values) == 32
    assert (longer.reason, longer.field) == (Reason.PROMPT_TOO_LONG, "inputs[1].tokens")


async def test_prompts_of_the_folder_stand_before_texts_by_name(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "document": "have: "}
    folder = tiny_encoder_dir(tmp_path, "bert", pooling="mean", prompts=prompts, default_prompt="document")
    inputs = [embedding.EmbedInput(text="ice")]
    async with whole_server(folder, tmp_path / "blocks") as served:
        default = await served.embeddings.Embed(embedding.EmbedRequest(inputs=inputs))
        query = await served.embeddings.Embed(embedding.EmbedRequest(inputs=inputs, prompt_name="query"))
        spelled = []
        for text in ("have: ice", "find: ice"):
            request = embedding.EmbedRequest()
            request.inputs.add(tokens={"ids": encoder_tokenizer().encode(text).ids})
            spelled.append(await served.embeddings.Embed(request))
        other = await refused(
            served.embeddings.Embed(embedding.EmbedRequest(inputs=inputs, prompt_name="sing"))
        )
        model = (await served.models.GetModel(models.GetModelRequest())).model
    assert [default.embeddings, query.embeddings] == [answer.embeddings for answer in spelled]
    assert other.field == "prompt_name" and "query, document" in other.message
    assert [(p.name, p.text, p.is_default) for p in model.embedding_prompts] == [
        ("query", "find: ", False),
        ("document", "have: ", True),
    ]


async def test_what_a_model_is_not_for_is_refused_with_what_it_is_for(tmp_path: Path) -> None:
    generate = inference.GenerateRequest(prompt={"text": "Ice"})
    warm = cache_messages.WarmRequest(prompt={"text": "Ice"})
    rank = reranking.RerankRequest(query="q", documents=["d"])
    embed = embedding.EmbedRequest(inputs=[embedding.EmbedInput(text="Ice")])
    encoder = tiny_encoder_dir(tmp_path, "bert")
    async with whole_server(encoder, tmp_path / "blocks") as served:
        calls = (
            served.inference.Generate(generate),
            done(served.cache.Warm(warm)),
            served.reranking.Rerank(rank),
        )
        answers = [await refused(call) for call in calls]
        embed.pooling = embedding.POOLING_MEAN
        ruled = await refused(served.embeddings.Embed(embed))
    assert {(answer.reason, answer.field) for answer in answers} == {(Reason.UNSUPPORTED, "model")}
    assert all("EmbeddingService.Embed" in answer.message for answer in answers)
    assert (ruled.reason, ruled.field) == (Reason.PARAMETER_OUT_OF_RANGE, "pooling")
    embed.ClearField("pooling")
    head = tiny_encoder_dir(tmp_path, "bert", scores=True, name="head")
    async with whole_server(head, tmp_path / "blocks") as served:
        answers = [
            await refused(call)
            for call in (served.inference.Generate(generate), served.embeddings.Embed(embed))
        ]
        fields = ["instruction", "text", "positive_answer", "negative_answer"]
        told = []
        for field in fields:
            asked = reranking.RerankRequest(query="q", documents=["d"])
            setattr(asked, field, "{query} {document}")
            told.append((await refused(served.reranking.Rerank(asked))).field)
    assert {(answer.reason, answer.field) for answer in answers} == {(Reason.UNSUPPORTED, "model")}
    assert all("RerankService.Rerank" in answer.message for answer in answers)
    assert told == fields


async def test_a_decoder_pools_as_its_folder_says_and_is_for_embeddings_alone(tmp_path: Path) -> None:
    plain = tiny_model_dir(tmp_path, "qwen3", name="plain")
    folder = tiny_model_dir(tmp_path, "qwen3", name="pooled")
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write_json(
        folder / "modules.json",
        [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
    )
    request = embedding.EmbedRequest(inputs=[embedding.EmbedInput(text="The ice house")])
    async with whole_server(folder, tmp_path / "blocks") as served:
        [own] = (await served.embeddings.Embed(request)).embeddings
        answer = await refused(served.inference.Generate(inference.GenerateRequest(prompt={"text": "Ice"})))
    async with whole_server(plain, tmp_path / "blocks") as served:
        [last] = (await served.embeddings.Embed(request)).embeddings
        request.pooling = embedding.POOLING_MEAN
        [mean] = (await served.embeddings.Embed(request)).embeddings
    assert answer.reason == Reason.UNSUPPORTED
    np.testing.assert_allclose(own.values, mean.values, atol=1e-5)
    assert not np.allclose(own.values, last.values, atol=0.05)


async def test_a_decoder_may_be_published_as_its_body_alone(tmp_path: Path) -> None:
    whole = tiny_model_dir(tmp_path, "qwen3", name="whole", tie_word_embeddings=True)
    bare = tiny_model_dir(tmp_path, "qwen3", name="bare", tie_word_embeddings=True)
    file = str(bare / "model.safetensors")
    weights = {name.removeprefix("model."): array for name, array in mx.load(file).items()}  # type: ignore[union-attr]
    mx.save_safetensors(file, weights)
    (bare / "1_Pooling").mkdir()
    write_json(bare / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    write_json(bare / "modules.json", [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    request = embedding.EmbedRequest(inputs=[embedding.EmbedInput(text="The ice house")])
    found = []
    for folder in (whole, bare):
        async with whole_server(folder, tmp_path / "blocks") as served:
            found.append((await served.embeddings.Embed(request)).embeddings[0].values)
    assert list(found[0]) == list(found[1])


async def test_hundreds_of_requests_leave_no_memory_behind(tmp_path: Path) -> None:
    folder = tiny_encoder_dir(tmp_path, "modernbert", pooling="mean")
    gc.collect()
    mx.clear_cache()  # a larger buffer that another test gave back would count whole
    others_bytes = mx.get_active_memory()
    """Of models that other tests of this process still have."""
    async with whole_server(folder, tmp_path / "blocks") as served:

        async def ask(first: int, count: int) -> None:
            for number in range(first, first + count):
                request = embedding.EmbedRequest()
                request.inputs.add(tokens={"ids": [5 + number % 90] * (1 + number % 200)})
                await served.embeddings.Embed(request)

        async def active_bytes() -> int:
            return int((await served.serving.GetStats(GetStatsRequest())).stats.engine.active_memory_bytes)

        await asyncio.gather(*(ask(lane * 25, 50) for lane in range(8)))
        weight_bytes = (await served.models.GetModel(models.GetModelRequest())).model.weight_bytes
        async with asyncio.timeout(BOUND_S):
            # MLX's own thread gives a pass's arrays back a moment after the pass.
            while await active_bytes() > others_bytes + weight_bytes + 1024:
                pass
