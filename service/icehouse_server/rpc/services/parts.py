"""Service parts: what the services of the API are built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from icehouse_server.config import ServerConfig
from icehouse_server.rpc.calls.calls import Calls
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.services.generation import Generation
from icehouse_server.rpc.services.prompts import PromptReader


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceParts:
    """Shared by the services. `draw_seed` gives 0 to 2**64 - 1, for a request that names none."""

    config: ServerConfig
    calls: Calls
    router: Router
    prompts: PromptReader
    generation: Generation
    draw_seed: Callable[[], int]
