"""EmbeddingService: Embed."""

from __future__ import annotations

import dataclasses
import functools

from icehouse.v1 import embedding_service_pb2 as messages
from icehouse.v1 import embedding_service_pb2_grpc

from icehouse_server.domain.call import Operation
from icehouse_server.domain.events import Finished
from icehouse_server.domain.model import ModelInfo, ModelKind
from icehouse_server.domain.request import Pooling, Vector, finished
from icehouse_server.errors import CannotFit, Reason
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.messages.field_checks import names_item, refuse_value
from icehouse_server.rpc.messages.proto_map import duration_proto, enum_of
from icehouse_server.rpc.services.generation import Service
from icehouse_server.rpc.services.prompts import UncheckedPrompt, input_of

_LISTED_LIMIT = 16


class EmbeddingService(Service, embedding_service_pb2_grpc.EmbeddingServiceServicer):
    """Each input runs through the engine like a prompt without output."""

    async def Embed(self, request: messages.EmbedRequest, context: Context) -> messages.EmbedResponse:
        async with self._calls.call(context, Operation.EMBEDDINGS) as call:
            return await self.embed(request, call)

    async def embed(self, request: messages.EmbedRequest, call: RpcCall) -> messages.EmbedResponse:
        model = await self._generation.use_for(request, call)
        whole = self._generation.request_of(request, model=model, call=call, wanted=ModelKind.EMBEDDING)
        dimension_count = self._check(request, model.info)
        whole = dataclasses.replace(whole, pooling=_pooling_of(request.pooling, model.info))
        inputs = await self._read(request, model, call)
        vectors: dict[int, Vector] = {}
        total_s = 0.0
        async with self._generation.run_each(whole, inputs, call=call) as events:
            async for index, event in events:
                if isinstance(event, Finished):
                    assert event.embedding is not None, "an input ended without its vector"
                    vectors[index] = event.embedding
                    total_s = max(total_s, event.usage.total_s)
        return messages.EmbedResponse(
            request_id=whole.name,
            model=model.info.model_id,
            embeddings=[
                messages.Embedding(
                    values=finished(
                        vectors[index],
                        dimension_count=dimension_count,
                        is_normalized=request.normalize or not request.HasField("normalize"),
                    ).tolist(),
                    prompt_tokens=len(inputs[index]),
                )
                for index in range(len(inputs))
            ],
            prompt_tokens=sum(map(len, inputs)),
            total_duration=duration_proto(total_s),
        )

    def _check(self, request: messages.EmbedRequest, info: ModelInfo) -> int:
        """Refuse what needs no tokenizer to be refused; return the number of dimensions."""
        if not info.embedding_size:
            raise CannotFit(
                Reason.EMBEDDING_UNSUPPORTED,
                f"model {info.model_id!r} ({info.architecture}) exposes no hidden states to pool",
                metadata={"model": info.model_id, "architecture": info.architecture},
            )
        limit = self._config.max_embedding_inputs
        if not 1 <= len(request.inputs) <= limit:
            refuse_value("inputs", len(request.inputs), f"1 to {limit} inputs", unit="inputs")
        if not 0 <= request.dimensions <= info.embedding_size:
            refuse_value("dimensions", request.dimensions, f"1 to {info.embedding_size}, or absent")
        return request.dimensions or info.embedding_size

    async def _read(
        self, request: messages.EmbedRequest, model: ServedModel, call: RpcCall
    ) -> list[tuple[int, ...]]:
        """Return the tokens of every input; raises InvalidRequest that names the faulty one."""
        before = _text_before(request.prompt_name, model.info)
        inputs: list[tuple[int, ...]] = []
        for index, message in enumerate(request.inputs):
            with names_item(f"inputs[{index}]"):
                check = functools.partial(input_of, message, model.info, before)
                prompt = UncheckedPrompt(check, message.ByteSize())
                inputs.append((await self._prompts.read(prompt, model)).token_ids)
        call.prompt_token_count = sum(map(len, inputs))
        return inputs


def _pooling_of(pooling: messages.Pooling.ValueType, info: ModelInfo) -> Pooling:
    """Return how to pool; raises InvalidRequest if the model has a rule and another one is asked for."""
    found = enum_of(pooling, messages.Pooling, Pooling, unset=info.pooling)
    if found is None:
        refuse_value("pooling", int(pooling), "a Pooling of this API version")
    if pooling and info.runs_whole:
        refuse_value("pooling", int(pooling), "absent: this model was trained with its own pooling")
    return found


def _text_before(name: str, info: ModelInfo) -> str:
    """Return the text to put before each input, by its name or the default; raises InvalidRequest."""
    for prompt in info.embedding_prompts:
        if prompt.name == name if name else prompt.is_default:
            return prompt.text
    if name:
        known = ", ".join(prompt.name for prompt in info.embedding_prompts[:_LISTED_LIMIT])
        refuse_value("prompt_name", name, f"absent, or one that ListModels shows: {known or 'none'}")
    return ""
