"""KV events of one server: the source, and the ZeroMQ publisher where one is configured."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import ConfigError, Reason, StartError, extra_command
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource
from icehouse_server.rpc.listen_address import is_loopback

if TYPE_CHECKING:
    # Of an optional extra: loaded only where an endpoint is configured.
    from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher

_log = logging.getLogger("icehouse.boot")


class KvEventParts:
    """Started when the edge is bound, stopped before it is. Raises ConfigError without the extra."""

    def __init__(
        self, config: Config, log: BlockLog, *, engine: EnginePort, router: Router, clock: Clock
    ) -> None:
        self._config = config
        self._router = router
        self._address = ""
        self.source = KvEventSource(
            log,
            settings=config.kv_events,
            block_token_count=config.cache.block_token_count,
            engine=engine,
            router=router,
            clock=clock,
        )
        self._publisher = self._make_publisher(clock)

    def start(self, address: str) -> None:
        """Publish for the server at this address; raises StartError when the endpoint cannot be had."""
        self._address = address
        if self._publisher is not None:
            _log.info("kv_events_opened", extra={"endpoint": self._publisher.start()})

    async def stop(self) -> None:
        """Publish no more."""
        await self.source.stop()
        if self._publisher is not None:
            await self._publisher.stop()

    def _make_publisher(self, clock: Clock) -> ZmqPublisher | None:
        settings = self._config.kv_events
        if settings.zmq_endpoint is None:
            return None
        if not (self._config.security.allow_insecure_public or is_private(settings.zmq_endpoint)):
            raise StartError(
                Reason.ADDRESS_INSECURE,
                f"kv_events.zmq_endpoint = {settings.zmq_endpoint!r} reaches other machines, in the clear "
                "and whoever they are; use one on 127.0.0.1, or say --allow-insecure-public if something "
                "else protects it",
                metadata={"endpoint": settings.zmq_endpoint},
            )
        try:
            from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
        except ModuleNotFoundError as error:
            raise ConfigError(
                Reason.CONFIG_INVALID,
                f"kv_events.zmq_endpoint is set, and the package {error.name} is not installed; "
                f"install the extra, {extra_command('fleet')}, or leave the setting away",
                field="kv_events.zmq_endpoint",
                metadata={"package": error.name or ""},
            ) from error
        return ZmqPublisher(
            self.source,
            endpoint=settings.zmq_endpoint,
            topic=self._topic,
            tenant=DEFAULT_TENANT if settings.zmq_tenant is None else Tenant(settings.zmq_tenant),
            clock=clock,
        )

    def _topic(self) -> str:
        """Return the topic; asked for when there are events, and so a model."""
        model, topic = self._router.model, self._config.kv_events.zmq_topic
        assert model is not None, "events before a model"
        return topic or f"kv@{self._address}@{model.info.model_id}"


def is_private(endpoint: str) -> bool:
    """Whether only this machine can reach what is sent to a ZeroMQ endpoint."""
    scheme, _, place = endpoint.removeprefix(CONNECT_PREFIX).partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    return is_loopback(place.rpartition(":")[0].strip("[]"))
