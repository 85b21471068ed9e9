"""Worker info: model, server and load in the form that gateways read. Pure functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.domain.model import ModelInfo, ModelKind
from icehouse_server.domain.stats import StatsSnapshot, TenantUse
from icehouse_server.rpc.worker.kv_event_streams import KvEventStreams
from icehouse_server.text.tokenizer_archive import TokenizerArchive


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker protocol needs to know of a model besides the API's services."""

    path: str
    """The model's folder."""
    architectures: tuple[str, ...]
    bos_token_id: int
    pad_token_id: int
    block_token_count: int
    running_limit: int
    """Most sequences that decode at once."""
    default_sampling: Mapping[str, float]
    """Sampling that the model's authors recommend, by this protocol's field names."""
    read_archive: Callable[[], TokenizerArchive]
    """Returns the archive of its tokenizer. Any thread; may take a second."""
    kv_events: KvEventStreams | None = None
    """None if there are no events; gateways then guess what is cached."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerModels:
    """The models that gateways may use. To them a worker is one model: their protocol's requests name
    none."""

    ports: Mapping[str, int]
    """The port of each model that has its own, by name. The server's own port serves the default model."""
    parts: dict[str, WorkerParts] = dataclasses.field(default_factory=dict)
    """Parts of the models that have been opened, by name."""


SERVER_TYPE = "vllm-grpc"
"""The only name by which gateways know a worker of this protocol."""
CONSTRAINT_START = "first_token"
"""Where a constraint begins to apply if the prompt lets the model reason first."""


def model_info_proto(info: ModelInfo, parts: WorkerParts) -> worker.GetModelInfoResponse:
    """Return the description of the model."""
    defaults = dict(parts.default_sampling)
    return worker.GetModelInfoResponse(
        model_path=parts.path,
        is_generation=info.kind is ModelKind.CHAT,
        max_context_length=info.context_token_limit,
        vocab_size=info.vocabulary_size,
        supports_vision=info.sees_images,
        served_model_name=info.model_id,
        tokenizer_path=parts.path,
        model_type=info.architecture,
        architectures=parts.architectures,
        eos_token_ids=info.eos_token_ids,
        pad_token_id=parts.pad_token_id,
        bos_token_id=parts.bos_token_id,
        # One token of the context is left for the output.
        max_req_input_len=info.context_token_limit - 1,
        default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "",
    )


def server_info_proto(
    info: ModelInfo,
    parts: WorkerParts,
    *,
    active_count: int,
    uptime_s: float,
    request_time: float,
    image_limit: int,
) -> worker.GetServerInfoResponse:
    """Return the server's state; `request_time` is `Clock.wall` at the latest request, 0 before the first."""
    return worker.GetServerInfoResponse(
        active_requests=active_count,
        is_paused=False,
        last_receive_timestamp=request_time,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype="auto",
        block_size=parts.block_token_count,
        model_dtype=info.dtype,
        max_num_seqs=parts.running_limit,
        constrained_decoding_start=CONSTRAINT_START,
        mm_item_limits=f"image={image_limit}" if info.sees_images else "",
    )


def load_proto(
    queues: TenantUse, parts: WorkerParts, snapshot: StatsSnapshot | None, *, waiting_token_count: int
) -> worker.SchedulerLoad:
    """Return how busy the server is: current queues, and the rest from the last sample.

    Without a sample it is how busy one tenant keeps the server, independent of other tenants.
    """
    engine = None if snapshot is None else snapshot.engine
    totals = queues if snapshot is None else engine
    has_prompts = totals is not None and totals.prompt_token_total
    hit_ratio = totals.cached_token_total / totals.prompt_token_total if totals and has_prompts else 0.0
    load = worker.SchedulerLoad(
        num_running_reqs=queues.running_count,
        num_waiting_reqs=queues.waiting_count,
        num_total_reqs=queues.running_count + queues.waiting_count,
        # What is cached of them is known only when they start; assume the usual share.
        num_waiting_uncached_tokens=round(waiting_token_count * (1 - hit_ratio)),
        max_running_requests=parts.running_limit,
        cache_hit_rate=hit_ratio,
    )
    if snapshot is None:
        return load
    load.gen_throughput = snapshot.rates.output_tokens_per_s
    if engine is not None and engine.kv_limit_bytes:
        # Cached blocks give way to requests, so they are not counted as used.
        load.token_usage = load.utilization = engine.kv_usage_ratio
        if snapshot.model is not None and (token_bytes := snapshot.model.kv_bytes_per_token):
            load.max_total_num_tokens = engine.kv_limit_bytes // token_bytes
            load.num_used_tokens = engine.kv_used_bytes // token_bytes
    return load
