"""The services of a house as a client has them."""

from __future__ import annotations

from typing import Any

from icehouse.v1 import (
    cache_service_pb2_grpc,
    embedding_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2_grpc,
    rerank_service_pb2_grpc,
)


class Stubs:
    """Whoever has a channel to a house."""

    channel: Any

    @property
    def inference(self) -> Any:
        return inference_service_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def models(self) -> Any:
        return model_service_pb2_grpc.ModelServiceStub(self.channel)

    @property
    def cache(self) -> Any:
        return cache_service_pb2_grpc.CacheServiceStub(self.channel)

    @property
    def embeddings(self) -> Any:
        return embedding_service_pb2_grpc.EmbeddingServiceStub(self.channel)

    @property
    def reranking(self) -> Any:
        return rerank_service_pb2_grpc.RerankServiceStub(self.channel)
