"""gRPC server: wires the services together, starts listening, and stops in order. Reflection too.

A model whose gateways expect a port of its own gets a second server there, behind the same interceptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from icehouse.v1 import (
    cache_service_pb2_grpc,
    embedding_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2_grpc,
    rerank_service_pb2_grpc,
    server_service_pb2_grpc,
)

from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.rpc.access.credentials import ServerSecurity
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.auth_interceptor import AuthInterceptor
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.calls.call_lifecycle import RpcCalls
from icehouse_server.rpc.calls.methods import METHODS
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.engine_client.seat import Seats
from icehouse_server.rpc.health import Health
from icehouse_server.rpc.listen_address import BoundAddress, bind, bind_tcp, bind_uds, server_options
from icehouse_server.rpc.services.cache_service import CacheService
from icehouse_server.rpc.services.embedding_service import EmbeddingService
from icehouse_server.rpc.services.generation import Generation, ServiceParts
from icehouse_server.rpc.services.inference_service import InferenceService
from icehouse_server.rpc.services.model_service import ModelService
from icehouse_server.rpc.services.observation import CallObservation
from icehouse_server.rpc.services.prompts import PromptReader
from icehouse_server.rpc.services.rerank_service import RerankService
from icehouse_server.rpc.services.server_service import ServerService, server_proto

if TYPE_CHECKING:
    from icehouse_server.rpc.worker.worker_info import WorkerModels


SERVICE_NAMES = tuple(
    dict.fromkeys(name.partition("/")[0] for name in METHODS if name.startswith("icehouse.v1."))
)

CHANNELZ_NAME = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

_draw_seed = functools.partial(secrets.randbits, 64)

_TURN_S = 0.02
"""A stop counts turns of the event loop, so that a blocked loop does not use up the time."""
_FLUSH_TURNS = 25
"""For sending the last answers and statuses after their calls have ended."""
_QUIET_TURNS = 2
"""Turns without a new call before the port is closed: gRPC cancels calls that are not accepted yet."""
_BUSY_TURNS = 50
"""The same if a call came after the stop began: a balancer checks health once a second."""
_LONGEST_TURNS = 150
_CLOSE_S = 0.5
"""How long gRPC may wait for calls whose answers are not read."""


class RpcServer:
    """The edge of the server. Constructed, started and stopped on the event loop."""

    def __init__(
        self,
        *,
        config: Config,
        seats: Seats,
        clock: Clock,
        telemetry: Telemetry | None = None,
        worker: WorkerModels | None = None,
        draw_seed: Callable[[], int] = _draw_seed,
    ) -> None:
        """`worker` also serves the gateways' worker protocol."""
        self._about = server_proto(config)
        self._config = config.server
        self._security_config = config.security
        self._tenants = Tenants(config.tenant, running_limit=config.engine.tenant_running_limit, clock=clock)
        self._prompts = PromptReader(config.server)
        self.observation = CallObservation(
            telemetry or Telemetry(),
            seats=seats,
            tenants=self._tenants,
            replies=self._prompts.replies.stats,
            clock=clock,
        )
        self.security = ServerSecurity(config.security, clock=clock)
        """Certificates and tokens, refreshed at an interval."""
        self._calls = RpcCalls(
            clock=clock,
            on_end=self.observation.call_ended,
            session_keys=config.server.session_keys,
            agent_keys=config.server.agent_keys,
            parent_keys=config.server.parent_keys,
        )
        self.health = Health(
            seats=seats,
            service_names=SERVICE_NAMES,
            heartbeat_timeout_s=config.server.stuck_timeout_s,
            stall_timeout_s=config.server.stall_timeout_s,
        )
        """The health service, from the engine's state and heartbeat."""
        self._interceptors = self._make_interceptors(config)
        self._server = self._grpc_server(config)
        self._worker_servers = {
            model: (port, self._grpc_server(config))
            for model, port in (worker.ports if worker else {}).items()
        }
        """Servers of the models with their own port for gateways."""
        self.worker_addresses: Mapping[str, str] = {}
        """Their addresses, once started."""
        self._refreshing: asyncio.Task[None] | None = None
        """Reads certificates and tokens again."""
        self._bound = BoundAddress("")
        self._private = BoundAddress("")
        self._seats = seats
        self._add_services(self._parts(seats, clock, draw_seed), worker)

    def _make_interceptors(self, config: Config) -> Sequence[grpc.aio.ServerInterceptor]:
        auth_interceptor = AuthInterceptor(
            config,
            security=self.security,
            calls=self._calls,
            run_long=self._prompts.run,
        )
        # The first is the outermost: the wire watcher also sees refusals, and callers are authenticated
        # before anything else.
        return (self.observation.interceptor, auth_interceptor)

    def _grpc_server(self, config: Config) -> grpc.aio.Server:
        options = server_options(config.server, config.connection)
        return grpc.aio.server(options=options, interceptors=self._interceptors)

    @property
    def _servers(self) -> Sequence[grpc.aio.Server]:
        return (self._server, *(server for _, server in self._worker_servers.values()))

    async def start(self, *, private_socket: Path | None = None) -> str:
        """Listen and return the address; raises StartError if it is not available.

        `private_socket` is an additional Unix socket, in plain text: calls need the same credentials there.
        """
        quiet_lost_answers()
        self.security.load()
        self._bound = bind(
            self._server, self._config, self._security_config, credentials=self.security.credentials
        )
        if private_socket is not None:
            self._private = bind_uds(self._server, private_socket)
        self.worker_addresses = {
            model: bind_tcp(
                server,
                host=self._config.host,
                port=port,
                security=self._security_config,
                credentials=self.security.credentials,
                flags="worker_",
            )
            for model, (port, server) in self._worker_servers.items()
        }
        for server in self._servers:
            await server.start()
        for seat in self._seats.loaded().values():
            seat.grammars.start()
        self._refreshing = background.start(self.security.run(), name="security")
        self.observation.start()
        return self.address

    @property
    def address(self) -> str:
        """The address for clients, once started: "host:port" or "unix:path"."""
        return self._bound.address

    async def stop(self, *, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, give running ones `grace_s`; end the rest as UNAVAILABLE."""
        self.health.stop_serving()
        for seat in self._seats.loaded().values():
            seat.prefetcher.close()
        if self._refreshing is not None:
            await background.end(self._refreshing)
        self._calls.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._calls.idle.wait()
        # Health watchers and others that would never end.
        self._calls.cut(endless_only=True)
        if grace_s:
            await self._refuse_latecomers()
        self._calls.cut()
        await self._flush()
        await asyncio.gather(*(server.stop(_CLOSE_S) for server in self._servers))
        await self.observation.stop()
        self._prompts.close()
        for seat in self._seats.loaded().values():
            seat.grammars.close()
        for bound in (self._bound, self._private):
            if bound.socket_file is not None:
                bound.socket_file.remove()

    async def _refuse_latecomers(self) -> None:
        """Return when no new calls arrive, or after the longest wait."""
        calls, quiet_count, wanted_count = self._calls, 0, _QUIET_TURNS
        for turn in range(_LONGEST_TURNS):
            refused_count = calls.refused_count
            await asyncio.sleep(_TURN_S)
            quiet_count += 1
            if calls.refused_count > refused_count:
                quiet_count, wanted_count = 0, _BUSY_TURNS
            elif calls.open_count and turn < _FLUSH_TURNS:
                quiet_count = 0
            if quiet_count >= wanted_count:
                return

    async def _flush(self) -> None:
        """Return when all calls have ended, or after a short while if readers take nothing."""
        for _ in range(_FLUSH_TURNS):
            if not self._calls.open_count:
                return
            await asyncio.sleep(_TURN_S)

    async def wait(self) -> None:
        await self._server.wait_for_termination()

    def _add_services(self, parts: ServiceParts, worker: WorkerModels | None) -> None:
        server, inference, embedding = self._server, InferenceService(parts), EmbeddingService(parts)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(parts), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(parts), server)
        embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(embedding, server)
        rerank_service_pb2_grpc.add_RerankServiceServicer_to_server(RerankService(parts), server)
        server_service_pb2_grpc.add_ServerServiceServicer_to_server(ServerService(parts, self._about), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names: tuple[str, ...] = (*SERVICE_NAMES, health.SERVICE_NAME)
        if worker is not None:
            # This needs an optional extra, which only a gateway's worker has.
            from icehouse_server.rpc.worker.vllm_engine_service import SERVICE_NAME, VllmEngineService

            at_ports = {model: server for model, (_, server) in self._worker_servers.items()}
            for model, door in ((self._seats.default_name, server), *at_ports.items()):
                VllmEngineService(
                    parts,
                    model=model,
                    serves=self.health.serves,
                    inference=inference,
                    embedding=embedding,
                    parts_of=worker.parts,
                ).add_to(door)
            for door in at_ports.values():
                health_pb2_grpc.add_HealthServicer_to_server(self.health, door)
            names = (*names, SERVICE_NAME)
        if self._config.reflection_enabled:
            channelz_names = (CHANNELZ_NAME,) if self._config.channelz_enabled else ()
            add_reflection(self._server, (*names, *channelz_names))
        if self._config.channelz_enabled:
            channelz.add_channelz_servicer(self._server)

    def _parts(self, seats: Seats, clock: Clock, draw_seed: Callable[[], int]) -> ServiceParts:
        return ServiceParts(
            config=self._config,
            clock=clock,
            calls=self._calls,
            seats=seats,
            observation=self.observation,
            prompts=self._prompts,
            generation=Generation(
                config=self._config,
                seats=seats,
                prompts=self._prompts,
                tenants=self._tenants,
                clock=clock,
            ),
            draw_seed=draw_seed,
        )


CORE_LOGGER_NAME = "grpc._cython.cygrpc"
_LOST_ANSWER = "ExecuteBatchError"
"""Names private to grpc: a test compares them with the installed version."""

_logger = logging.getLogger("icehouse_server.rpc.grpc_log")


def quiet_lost_answers() -> None:
    """Log answers that grpc's core could not send as DEBUG lines without a traceback.

    This happens when a caller leaves just as its answer is sent. grpc.aio logs an error with a traceback, so
    any caller could fill the log.
    """
    # A function is added only once, however often this is called.
    logging.getLogger(CORE_LOGGER_NAME).addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != _LOST_ANSWER:
        return True
    _logger.debug(
        "a caller left as its answer was sent", extra={"grpc": grpc.__version__, "event": record.getMessage()}
    )
    return False


V1_NAME = "grpc.reflection.v1.ServerReflection"
V1ALPHA_NAME = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection v1 and v1alpha, for `service_names` and for reflection itself.

    `grpcio-reflection` has only v1alpha. v1 has the same messages under another package name, field for
    field, so the same servicer answers both; its descriptor is derived, so that v1 can describe itself too.
    """
    names = (*service_names, V1_NAME, V1ALPHA_NAME)
    servicer = reflection.aio.ReflectionServicer(names, pool=_Pool(pool_with_v1()))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1_NAME, methods),))


class _Pool:
    """A descriptor pool that also finds methods; protobuf's own does not."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file of a message, enum, service, field or method; raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service_name, _, method_name = symbol.rpartition(".")
            service = self._pool.FindServiceByName(service_name)
            return service.methods_by_name[method_name].containing_service.file


@functools.cache
def pool_with_v1() -> descriptor_pool.DescriptorPool:
    """Return the pool of all descriptors, including version 1 of reflection."""
    pool = descriptor_pool.Default()
    alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    renamed = text_format.MessageToString(alpha).replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
    file = text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    pool.Add(file)
    return pool
