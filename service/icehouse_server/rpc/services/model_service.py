"""ModelService: the models that callers may name, and which of them are loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine

from icehouse.v1 import model_service_pb2 as messages
from icehouse.v1 import model_service_pb2_grpc
from icehouse.v1.adapter_pb2 import Adapter

from icehouse_server.domain.model import ListedModel
from icehouse_server.rpc.calls.call_lifecycle import Context
from icehouse_server.rpc.messages.field_checks import page_size_of
from icehouse_server.rpc.messages.proto_map import enum_proto, fill
from icehouse_server.rpc.services.generation import Service
from icehouse_server.rpc.services.server_service import number_of


class ModelService(Service, model_service_pb2_grpc.ModelServiceServicer):
    """Owned by the event loop."""

    async def ListModels(
        self, request: messages.ListModelsRequest, context: Context
    ) -> messages.ListModelsResponse:
        async with self._calls.call(context) as call:
            page_size, start = page_size_of(request.page_size), number_of(request.page_token)
            listed = self._seats.listed(call.caller)
            page = listed[start : start + page_size]
            return messages.ListModelsResponse(
                models=map(model_proto, page),
                next_page_token=str(start + page_size) if start + page_size < len(listed) else "",
            )

    async def GetModel(
        self, request: messages.GetModelRequest, context: Context
    ) -> messages.GetModelResponse:
        async with self._calls.call(context) as call:
            return messages.GetModelResponse(model=model_proto(self._seats.find(request.model, call.caller)))

    async def LoadModel(  # type: ignore[override]
        self, request: messages.LoadModelRequest, context: Context
    ) -> None:
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():

            def tell(loading: messages.LoadingModel) -> Awaitable[None]:
                return timer.write(context, messages.LoadModelResponse(progress=loading))

            if request.fetch_only:
                work: Coroutine[None, None, object] = self._seats.fetch(request.model, call.caller)
            else:
                work = self._generation.use(request.model, call)
            await self._generation.telling(work, request.model, call, tell)
            model = model_proto(self._seats.find(request.model, call.caller))
            await timer.write(context, messages.LoadModelResponse(done=model))

    async def UnloadModel(
        self, request: messages.UnloadModelRequest, context: Context
    ) -> messages.UnloadModelResponse:
        async with self._calls.call(context) as call:
            unloaded = await self._seats.unload(request.model, call.caller)
            return messages.UnloadModelResponse(model=model_proto(unloaded))


def model_proto(model: ListedModel) -> messages.Model:
    """Return a model with its state; little else is known of one that is not loaded."""
    message = messages.Model(
        id=model.name,
        state=enum_proto(model.state, messages.ModelState),
        state_detail=model.detail,
        aliases=model.aliases,
    )
    if model.info is None:
        message.adapters.extend(Adapter(name=name) for name in model.adapters)
        return message
    return fill(message, model.info)
