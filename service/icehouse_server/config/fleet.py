"""Fleet settings: what makes a server a worker behind a gateway."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.setting import Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class FleetConfig:
    """How gateways reach this server. All of it is off unless asked for."""

    worker_enabled: bool = setting(
        False,
        Kind.SWITCH,
        "Serve vllm.grpc.engine.VllmEngine beside the API, on the same port, for gateways such as SMG; needs "
        "the extra `fleet`.",
    )
