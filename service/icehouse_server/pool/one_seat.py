"""One seat: that of a server with a single model, which stays loaded from start to end. Event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from icehouse_server.clock import Clock
from icehouse_server.domain.model import EngineState, ListedModel, ModelState
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.engine_client.seat import ModelUse, Seat, unknown_model


class OneSeat:
    """The `Seats` of one model. While it loads, calls do not wait but are refused."""

    are_several = False
    default_name = ""

    def __init__(self, seat: Seat, clock: Clock) -> None:
        self._seat = seat
        self._clock = clock
        self.ended = seat.router.left_ready

    @property
    def state(self) -> EngineState:
        return self._seat.router.state

    def loaded(self) -> Mapping[str, Seat]:
        return {self.default_name: self._seat}

    async def use(self, name: str, call: ModelUse) -> Seat:
        return self.seat_of(name, call.caller)

    def seat_of(self, name: str, caller: Caller) -> Seat:
        self.find(name, caller)
        return self._seat

    async def fetch(self, name: str, caller: Caller) -> None:
        self.find(name, caller)

    async def unload(self, name: str, caller: Caller) -> ListedModel:
        served = self.find(name, caller)
        raise InvalidRequest(
            Reason.UNSUPPORTED,
            f"{served.name!r} is the only model here and stays loaded; stop the server instead",
            field="model",
            metadata={"model": served.name},
        )

    def listed(self, caller: Caller) -> Sequence[ListedModel]:
        return [self.find("", caller)]

    def find(self, name: str, caller: Caller) -> ListedModel:
        info = self._seat.router.require_model().info
        if name and name != info.model_id:
            raise unknown_model(name, [info.model_id])
        return ListedModel(info.model_id, ModelState.READY, info=info)

    def takes(self, name: str, caller: Caller) -> bool:
        self.find(name, caller)
        return True

    def turns(self, *, patience_s: float) -> bool:
        return self._seat.turns(self._clock, patience_s=patience_s)

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._seat.router.add_listener(listener)
