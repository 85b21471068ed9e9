"""Worker protocol as the configuration wants it: what gateways are told of the model's folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from icehouse_server.config import Config
from icehouse_server.engine.runner.model_loader import ModelSource, read_config, read_generation_config
from icehouse_server.errors import ConfigError, Reason, extra_command
from icehouse_server.rpc.kv_events.kv_event_source import KvEventSource
from icehouse_server.text.tokenizer_archive import read_tokenizer_archive

if TYPE_CHECKING:
    from icehouse_server.rpc.worker.worker_info import WorkerParts

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def worker_parts(
    config: Config,
    source: ModelSource,
    *,
    running_limit: int,
    kv_events: KvEventSource | None = None,
) -> WorkerParts | None:
    """Return what the worker protocol needs, None where it is off; raises ConfigError without its extra."""
    if not config.fleet.worker_enabled:
        return None
    try:
        # Of an optional extra.
        from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams
        from icehouse_server.rpc.worker.worker_info import ServedFolder, WorkerParts
    except ModuleNotFoundError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"fleet.worker_enabled is set, and the package {error.name} is not installed; "
            f"install the extra, {extra_command('fleet')}, or leave the setting away",
            field="fleet.worker_enabled",
            metadata={"package": error.name or ""},
        ) from error
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
    """Return a token of the model's configuration; 0 where it has none, which is how the protocol says so."""
    found = model.get(key)
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, int) and first >= 0 else 0
