"""Pool parts: a server of several models, each found and opened when the pool asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping

from icehouse_server.bootstrap.composition import EngineParts, OpenedEngine, Server, open_engine
from icehouse_server.bootstrap.kept_models import held
from icehouse_server.bootstrap.model_source import ServedModels, locate_models, served_name
from icehouse_server.bootstrap.room import ModelSize, Room
from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.device import Device
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import CannotFit, ConfigError, Reason, StartError
from icehouse_server.pool.model_pool import ModelPool, ModelTerms
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.rpc_server import RpcServer

_log = logging.getLogger("icehouse.boot")


def build_pool(config: Config, *, device: Device, clock: Clock) -> Server:
    """Wire a server of several models, none of which is opened yet. On the event loop; raises ConfigError for
    names that two of them have."""
    parts = EngineParts.of(config, device, clock)
    configs = {served_name(model): config.of_model(model) for model in config.models}
    terms = [
        ModelTerms(
            name=served_name(model),
            aliases=model.aliases,
            tenants=frozenset(map(Tenant, model.tenants)),
            is_pinned=model.pinned,
            ttl_s=model.ttl_s,
        )
        for model in config.models
    ]
    check_names(terms)
    limit_bytes = parts.budget.limit_bytes
    pool = ModelPool(
        terms,
        opener=PooledModels(configs, parts, asyncio.get_running_loop()),
        clock=clock,
        limit_bytes=limit_bytes,
        grace_s=config.server.drain_grace_s,
    )
    rpc = RpcServer(config=config, seats=pool, clock=clock, telemetry=parts.telemetry.watchers)
    return Server(parts.inference, rpc, clock, parts.tiers, parts.telemetry, pool=pool)


def check_names(terms: list[ModelTerms]) -> None:
    """Raise ConfigError for a name that two models have, or one model twice."""
    seen: dict[str, str] = {}
    for each in terms:
        for name in (each.name, *each.aliases):
            if name in seen:
                raise ConfigError(
                    Reason.CONFIG_INVALID,
                    f"models: {name!r} names {seen[name]!r} and {each.name!r}; give each a `model_name`",
                    field="models",
                    metadata={"name": name},
                )
            seen[name] = each.name


class PooledModels:
    """The `ModelOpener` of a server. Methods are called in any thread, for one model at a time."""

    def __init__(
        self,
        configs: Mapping[str, Config],
        parts: EngineParts,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._configs = configs
        self._parts = parts
        self._loop = loop
        self._located: dict[str, tuple[ServedModels, int]] = {}

    def locate(self, name: str) -> int:
        room = Room(memory_limit_bytes=self._parts.budget.limit_bytes)

        def check(_: str, size: ModelSize) -> None:
            try:
                room.check(name, size)
            except StartError as error:
                raise CannotFit(error.reason, error.message, metadata=error.metadata) from error

        began = self._parts.clock.monotonic()
        found = locate_models(self._configs[name].model, on_progress=lambda *_: None, on_size=check)
        self._located[name] = found, room.weight_bytes
        duration_s = round(self._parts.clock.monotonic() - began, 3)
        facts = {"model": name, "path": found.model.path, "size_bytes": room.weight_bytes}
        _log.info("model_found", extra={**facts, "duration_s": duration_s})
        return room.weight_bytes

    def open(self, name: str) -> OpenedEngine:
        config, (found, weight_bytes) = self._configs[name], self._located[name]
        began = self._parts.clock.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(*found.folders))
            model = dataclasses.replace(found.model, model_id=name)
            router = Router(self._loop)
            opened = open_engine(
                config,
                model=model,
                draft=found.draft,
                router=router,
                parts=self._parts,
                expected_bytes=weight_bytes,
            )
            duration_s = round(self._parts.clock.monotonic() - began, 3)
            _log.info("model_opened", extra={"model": name, "duration_s": duration_s})
            return dataclasses.replace(opened, held=stack.pop_all())
