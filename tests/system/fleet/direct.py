"""Workers asked without a gateway, by the protocol that it speaks to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

_BOUND_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a worker told of one prompt."""

    prompt_token_count: int
    cached_token_count: int


def ask(port: int, token_ids: Sequence[int], *, tenant: str = "") -> Answer:
    """Have a worker compute a prompt, for a tenant whom its metadata names."""
    request = vllm_engine_pb2.GenerateRequest(
        tokenized={"input_ids": token_ids}, sampling_params={"temperature": 0.0, "max_tokens": 1}
    )
    metadata = (("icehouse-tenant", tenant),) if tenant else ()
    with _worker(port) as worker:
        [response] = worker.Generate(request, metadata=metadata, timeout=_BOUND_S)
    return Answer(response.complete.prompt_tokens, response.complete.cached_tokens)


def flush(port: int) -> None:
    """Have a worker forget every block."""
    with _worker(port) as worker:
        assert worker.FlushCache(common_pb2.FlushCacheRequest(), timeout=_BOUND_S).success


@contextlib.contextmanager
def _worker(port: int) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
