"""Fleet: the KV events and the worker protocol that the configuration offers to gateways."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.runner.model_loader import ModelSource, read_config, read_generation_config
from icehouse_server.errors import Reason, StartError, imports_of_extra
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource
from icehouse_server.rpc.listen_address import is_loopback
from icehouse_server.text.tokenizer_archive import read_tokenizer_archive

if TYPE_CHECKING:
    # Of an optional extra.
    from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
    from icehouse_server.rpc.worker.worker_info import WorkerParts

_log = logging.getLogger("icehouse.boot")

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class KvEventParts:
    """Started when the RPC server listens. Raises ConfigError without the extra for ZeroMQ."""

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
        await self.source.stop()
        if self._publisher is not None:
            await self._publisher.stop()

    def _make_publisher(self, clock: Clock) -> ZmqPublisher | None:
        settings = self._config.kv_events
        if settings.zmq_endpoint is None:
            return None
        if not (self._config.security.allow_insecure_public or _is_private(settings.zmq_endpoint)):
            raise StartError(
                Reason.ADDRESS_INSECURE,
                f"kv_events.zmq_endpoint = {settings.zmq_endpoint!r} reaches other machines, in the clear "
                "and whoever they are; use one on 127.0.0.1, or say --allow-insecure-public if something "
                "else protects it",
                metadata={"endpoint": settings.zmq_endpoint},
            )
        with imports_of_extra("fleet", setting="kv_events.zmq_endpoint"):
            from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher
        return ZmqPublisher(
            self.source,
            endpoint=settings.zmq_endpoint,
            topic=self._topic,
            tenant=DEFAULT_TENANT if settings.zmq_tenant is None else Tenant(settings.zmq_tenant),
            clock=clock,
        )

    def _topic(self) -> str:
        """Return the topic. Called when there are events, so there is a model."""
        model, topic = self._router.model, self._config.kv_events.zmq_topic
        assert model is not None, "events before a model"
        return topic or f"kv@{self._address}@{model.info.model_id}"


def _is_private(endpoint: str) -> bool:
    """Whether only this machine can reach what is sent to a ZeroMQ endpoint."""
    scheme, _, address = endpoint.removeprefix(CONNECT_PREFIX).partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def worker_parts(
    config: Config, source: ModelSource, *, running_limit: int, kv_events: KvEventSource | None = None
) -> WorkerParts | None:
    """Return the parts of the worker protocol, None if it is off. Raises ConfigError without its extra."""
    if not config.fleet.worker_enabled:
        return None
    with imports_of_extra("fleet", setting="fleet.worker_enabled"):
        from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams
        from icehouse_server.rpc.worker.worker_info import ServedFolder, WorkerParts
    model = read_config(source.path)
    generation = read_generation_config(source.path)
    return WorkerParts(
        ServedFolder(
            path=str(source.path),
            architectures=tuple(str(name) for name in model.get("architectures") or ()),
            bos_token_id=_token_id(model, "bos_token_id"),
            pad_token_id=_token_id(model, "pad_token_id"),
            block_token_count=config.cache.block_token_count,
            running_limit=running_limit,
            default_sampling={
                key: float(generation[key])
                for key in _SAMPLING_KEYS
                if isinstance(generation.get(key), int | float)
            },
            read_archive=functools.partial(read_tokenizer_archive, source.path),
        ),
        kv_events=None
        if kv_events is None
        else KvEventStreams(kv_events, operators_see_tokens=config.fleet.operator_kv_tokens_enabled),
    )


def _token_id(model: Mapping[str, Any], key: str) -> int:
    """Return a token of the model's configuration; 0 if it has none, as the protocol wants it."""
    found = model.get(key)
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, int) and first >= 0 else 0
