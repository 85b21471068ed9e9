"""Pool parts: a server of several models, each located and opened when the pool asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from icehouse_server.bootstrap.composition import (
    EngineParts,
    OpenedEngine,
    Server,
    engine_limits,
    open_engine,
)
from icehouse_server.bootstrap.kept_models import held
from icehouse_server.bootstrap.machine import weights_dtype
from icehouse_server.bootstrap.model_source import ServedModels, locate_models, may_be_found, served_name
from icehouse_server.bootstrap.room import MachineResources, ModelSize, held_bytes
from icehouse_server.bootstrap.telemetry import worker_models
from icehouse_server.clock import Clock
from icehouse_server.config import Config
from icehouse_server.device import Device
from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.memory_model import MemoryModel, value_bytes
from icehouse_server.engine.runner.model_loader import read_config
from icehouse_server.errors import CannotFit, ConfigError, Reason, StartError
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.pool.places import ModelNeeds, ModelTerms
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.rpc_server import RpcServer

if TYPE_CHECKING:
    # This needs an optional extra.
    from icehouse_server.rpc.worker.worker_info import WorkerModels

_log = logging.getLogger("icehouse.boot")


def build_pool(config: Config, *, device: Device, clock: Clock) -> Server:
    """Wire a server of several models, without opening any. On the event loop; raises ConfigError if two of
    them have the same name."""
    parts = EngineParts.of(config, device, clock)
    configs = {served_name(model): config.of_model(model) for model in config.models}
    terms = [
        ModelTerms(
            name=served_name(model),
            aliases=model.aliases,
            adapters=tuple(named.name for named in configs[served_name(model)].model.adapters),
            tenants=frozenset(map(Tenant, model.tenants)),
            is_pinned=model.pinned,
            ttl_s=model.ttl_s,
        )
        for model in config.models
    ]
    check_names(terms)
    for name, own in configs.items():
        if not may_be_found(own.model.model):
            detail = f"there is no model folder at {own.model.model!r}; requests for it fail until then"
            _log.warning("model_not_here", extra={"model": name, "detail": detail})
    ports = {
        served_name(model): model.worker_port for model in config.models if model.worker_port is not None
    }
    worker = worker_models(config, ports=ports)
    pool = ModelPool(
        terms,
        opener=PooledModels(configs, parts, asyncio.get_running_loop(), worker),
        clock=clock,
        limit_bytes=parts.budget.limit_bytes,
        grace_s=config.server.drain_grace_s,
    )
    rpc = RpcServer(config=config, seats=pool, clock=clock, telemetry=parts.watchers, worker=worker)
    return Server(parts.inference, rpc, clock, parts.tiers, parts.telemetry, parts.kv_events, pool=pool)


def check_names(terms: list[ModelTerms]) -> None:
    """Raise ConfigError if a name is used for two models, or twice for one."""
    seen: set[str] = set()
    for each in terms:
        for name in (each.name, *each.aliases):
            if name in seen:
                raise ConfigError(
                    Reason.CONFIG_INVALID,
                    f"models: {name!r} names more than one model, or one twice; give each its own "
                    "`model_name` and `aliases`",
                    field="models",
                    metadata={"name": name},
                )
            seen.add(name)


class PooledModels:
    """The `ModelOpener` of a server."""

    def __init__(
        self,
        configs: Mapping[str, Config],
        parts: EngineParts,
        loop: asyncio.AbstractEventLoop,
        worker: WorkerModels | None,
    ) -> None:
        """`worker` is told about each model that is opened."""
        self._configs = configs
        self._parts = parts
        self._loop = loop
        self._worker = worker
        self._located: dict[str, tuple[ServedModels, int]] = {}

    def locate(self, name: str) -> ModelNeeds:
        room, model = (
            MachineResources(memory_limit_bytes=self._parts.budget.limit_bytes),
            self._configs[name].model,
        )

        def check(asked: str, size: ModelSize) -> None:
            # Callers see the message, so it names no folder.
            what = name if asked == model.model else f"the draft model of {name}"
            try:
                room.check(what, size)
            except StartError as error:
                raise CannotFit(error.reason, error.message, metadata=error.metadata) from error

        began = self._parts.clock.monotonic()
        dtype = weights_dtype(model, self._parts.device)
        found = locate_models(model, on_progress=lambda *_: None, on_size=check, dtype=dtype)
        needs = self._needs(name, found, dtype)
        self._located[name] = found, needs.weight_bytes
        duration_s = round(self._parts.clock.monotonic() - began, 3)
        facts = {"model": name, "path": found.model.path, "size_bytes": needs.weight_bytes}
        _log.info("model_found", extra={**facts, "duration_s": duration_s})
        return needs

    def _needs(self, name: str, found: ServedModels, dtype: str) -> ModelNeeds:
        """Return the memory for a model and for a prompt of one chunk, as far as its config.json tells."""
        whole, device = self._configs[name], self._parts.device
        config = read_config(found.model.path)
        compute_bytes = 4 if dtype == "float32" else value_bytes(config)
        model = MemoryModel.by_config(config, compute_bytes=compute_bytes, device=device.backend.value)
        chunk = engine_limits(whole, device).prefill_chunk_token_count
        return ModelNeeds(
            weight_bytes=sum(held_bytes(folder, dtype=dtype) for folder in found.folders),
            run_bytes=model.request_bytes(token_count=chunk, chunk_token_count=chunk),
        )

    def _tell_gateways(self, name: str, opened: OpenedEngine, stack: contextlib.ExitStack) -> None:
        if self._worker is not None:
            known = self._worker.parts
            known[name] = opened.worker_parts(self._configs[name])
            # Its KV events end with its engine; gateways may still ask about the model.
            stack.callback(lambda: known.update({name: dataclasses.replace(known[name], kv_events=None)}))

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
            # Gateways are told what the model's files say, and reading that may fail.
            with contextlib.ExitStack() as unsound:
                unsound.callback(opened.give_up)
                self._tell_gateways(name, opened, stack)
                unsound.pop_all()
            duration_s = round(self._parts.clock.monotonic() - began, 3)
            _log.info("model_opened", extra={"model": name, "duration_s": duration_s})
            return dataclasses.replace(opened, held=stack.pop_all())
