"""ModelService: ListModels, GetModel. One model is served."""

from __future__ import annotations

from icehouse.v1 import model_service_pb2 as messages
from icehouse.v1 import model_service_pb2_grpc

from icehouse_server.rpc.calls.calls import Calls, Context
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.messages.responses import model_proto
from icehouse_server.rpc.messages.validation import check_model, page_size_of, refuse_value


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """Shows what is served."""

    def __init__(self, *, calls: Calls, router: Router) -> None:
        self._calls = calls
        self._router = router

    async def ListModels(
        self, request: messages.ListModelsRequest, context: Context
    ) -> messages.ListModelsResponse:
        """Answer with the one page there is."""
        async with self._calls.call("ListModels", context):
            page_size_of(request.page_size)
            if request.page_token:
                refuse_value("page_token", request.page_token, "absent: there is one page")
            model = self._router.require_model()
            return messages.ListModelsResponse(models=[model_proto(model.info)])

    async def GetModel(
        self, request: messages.GetModelRequest, context: Context
    ) -> messages.GetModelResponse:
        """Answer with the model's facts."""
        async with self._calls.call("GetModel", context):
            model = self._router.require_model()
            check_model(request.model, model.info)
            return messages.GetModelResponse(model=model_proto(model.info))
