"""Engine metrics: the table that names each counter of `EngineStats`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import EngineStats, Snapshot
from icehouse_server.telemetry.observed import Observed, Value, counter, gauge, one

_Read = Callable[[Snapshot], Iterable[Value]]


def _engine(read: Callable[[EngineStats], float]) -> _Read:
    return lambda s: one(None if s.engine is None else read(s.engine))


def _requests(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("waiting",), s.engine.waiting_count
        yield ("loading",), s.engine.loading_count
        yield ("prefilling",), s.engine.prefilling_count
        yield ("decoding",), s.engine.decoding_count


def _ended(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("finished",), s.engine.finished_total
        yield ("cancelled",), s.engine.cancelled_total
        yield ("failed",), s.engine.failed_total
        yield ("rejected",), s.engine.rejected_total


def _steps(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("0.5",), s.engine.decode_step_p50_s
        yield ("0.99",), s.engine.decode_step_p99_s


def _passes(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("0.5",), s.engine.pass_p50_s
        yield ("0.99",), s.engine.pass_p99_s


def _tokens(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("prompt_cached",), s.engine.cached_token_total
        yield ("prompt_computed",), s.engine.prefilled_token_total
        yield ("output",), s.engine.output_token_total


def _drafts(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("accepted",), s.engine.accepted_draft_token_total
        yield ("rejected",), s.engine.drafted_token_total - s.engine.accepted_draft_token_total


def _images(s: Snapshot) -> Iterable[Value]:
    if s.engine is not None:
        yield ("encoded",), s.engine.encoded_image_total
        yield ("reused",), s.engine.reused_image_total


def _state(s: Snapshot) -> Iterable[Value]:
    for state in EngineState:
        yield (state.name.lower(),), float(s.state is state)


def _model(s: Snapshot) -> Iterable[Value]:
    if s.model is not None:
        model = s.model
        yield (model.model_id, model.architecture, model.dtype, model.device, model.fingerprint_hex[:16]), 1.0


ENGINE_METRICS: tuple[Observed, ...] = (
    gauge("icehouse.engine.state", "{state}", "1 for the state the engine is in.", _state, "icehouse.state"),
    gauge(
        "icehouse.model.info",
        "{model}",
        "1, with the served model's facts as labels.",
        _model,
        *("model", "architecture", "dtype", "device", "fingerprint"),
    ),
    gauge(
        "icehouse.engine.heartbeat.age",
        "s",
        "Since the inference loop last turned; it grows when a step is stuck.",
        lambda s: one(s.heartbeat_age_s),
    ),
    gauge("icehouse.engine.uptime", "s", "Since the engine started.", _engine(lambda e: e.uptime_s)),
    gauge("icehouse.engine.requests", "{request}", "Requests by phase.", _requests, "icehouse.phase"),
    gauge(
        "icehouse.engine.running",
        "{request}",
        "Requests that were let in and have not ended: they load, prefill or decode.",
        _engine(lambda e: e.running_count),
    ),
    gauge(
        "icehouse.engine.kv.usage",
        "1",
        "Of what KV may take beside the model, what running requests take; 0 without a limit.",
        _engine(lambda e: e.kv_usage_ratio),
    ),
    gauge(
        "icehouse.engine.kv.used",
        "By",
        "KV of running requests, with the room it has to grow into; the prefix cache is not in it.",
        _engine(lambda e: e.kv_used_bytes),
    ),
    gauge(
        "icehouse.engine.kv.limit",
        "By",
        "What KV may take beside the model; 0 is unlimited.",
        _engine(lambda e: e.kv_limit_bytes),
    ),
    gauge(
        "icehouse.engine.waiting.limit",
        "{request}",
        "Most requests that may wait; more are refused with QUEUE_FULL.",
        _engine(lambda e: e.waiting_limit),
    ),
    gauge(
        "icehouse.engine.decoding.limit",
        "{request}",
        "Most requests that decode at once.",
        _engine(lambda e: e.decoding_limit),
    ),
    gauge(
        "icehouse.engine.mailbox.messages",
        "{message}",
        "Messages waiting for the inference thread.",
        _engine(lambda e: e.mailbox_count),
    ),
    gauge(
        "icehouse.engine.mailbox.limit",
        "{message}",
        "Most messages that may wait for the inference thread.",
        _engine(lambda e: e.mailbox_limit),
    ),
    counter(
        "icehouse.engine.requests.accepted",
        "{request}",
        "Requests taken in.",
        _engine(lambda e: e.accepted_total),
    ),
    counter("icehouse.engine.requests.ended", "{request}", "Requests ended.", _ended, "icehouse.outcome"),
    counter(
        "icehouse.engine.requests.parked",
        "{request}",
        "Times a running request gave way for want of memory and went on later.",
        _engine(lambda e: e.parked_total),
    ),
    counter(
        "icehouse.engine.draft.tokens",
        "{token}",
        "Draft tokens of speculation, by what became of them.",
        _drafts,
        "icehouse.outcome",
    ),
    counter(
        "icehouse.engine.images",
        "{image}",
        "Images that prompts needed vectors of, by where those came from.",
        _images,
        "icehouse.kind",
    ),
    counter(
        "icehouse.engine.image.encode.time",
        "s",
        "Time that the inference thread spent in the vision tower.",
        _engine(lambda e: e.image_encode_s),
    ),
    gauge(
        "icehouse.engine.image.features",
        "By",
        "Vectors that are kept for images that may come again.",
        _engine(lambda e: e.image_feature_bytes),
    ),
    gauge(
        "icehouse.engine.image.features.limit",
        "By",
        "Most that is kept of them.",
        _engine(lambda e: e.image_feature_limit_bytes),
    ),
    counter("icehouse.engine.tokens", "{token}", "Tokens by where they came from.", _tokens, "icehouse.kind"),
    counter("icehouse.engine.steps", "{step}", "Steps of the loop.", _engine(lambda e: e.step_total)),
    gauge(
        "icehouse.engine.decode.step",
        "s",
        "Duration of a decode step, quantiles of a recent window.",
        _steps,
        "quantile",
    ),
    gauge(
        "icehouse.engine.pass",
        "s",
        "Duration of a forward pass, quantiles of a recent window; a new request waits for the one running.",
        _passes,
        "quantile",
    ),
    gauge(
        "icehouse.engine.prefill.rate",
        "{token}/s",
        "Prompt tokens computed per second of prefill, a moving average.",
        _engine(lambda e: e.prefill_tokens_per_s),
    ),
    gauge(
        "icehouse.engine.memory.active",
        "By",
        "Held by MLX for arrays.",
        _engine(lambda e: e.active_memory_bytes),
    ),
    gauge(
        "icehouse.engine.memory.peak",
        "By",
        "Most that MLX held for arrays since the start.",
        _engine(lambda e: e.peak_memory_bytes),
    ),
    gauge(
        "icehouse.engine.memory.limit",
        "By",
        "What the engine may use; 0 is unlimited.",
        _engine(lambda e: e.memory_limit_bytes),
    ),
)
