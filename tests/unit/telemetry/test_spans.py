"""CallSpans as a collector receives them: whose children they are, when they were, what they say."""

from __future__ import annotations

import builtins
import dataclasses
import time
from typing import Any

import pytest
from icehouse_server.bootstrap.telemetry import TelemetryParts
from icehouse_server.config import load_config
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.call import CallRecord, SpanNames, SpillRecord
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import part_of, request_id_of
from icehouse_server.errors import ConfigError
from icehouse_server.storage.api import BlockPersisted, Outcome, StorageFailure, Ticket
from icehouse_server.telemetry import call_spans as module
from icehouse_server.telemetry.call_spans import CallSpans, otlp_exporter, stages_of

from tests.fixtures.known_blocks import Shelf, record_of
from tests.fixtures.proxy import RefusingProxy
from tests.fixtures.telemetry.collector import Collector, Sent, collecting
from tests.fixtures.telemetry.facts import call_record

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BLUE = Tenant("blue")
KEPT = f"00-{TRACE_ID}-{CALLER_ID}-01"
NOT_KEPT = f"00-{TRACE_ID}-{CALLER_ID}-00"


def sent_for(*told: CallRecord | SpillRecord, ratio: float = 1.0) -> tuple[Collector, list[SpanNames | None]]:
    """Return what a collector holds after these were told in this order."""
    with collecting() as (collector, endpoint):
        spans = CallSpans(otlp_exporter(endpoint), sample_ratio=ratio, version="1.2")
        names = []
        for record in told:
            if isinstance(record, CallRecord):
                names.append(spans.trace(record))
            else:
                spans.spilled(record)
        spans.stop()
    return collector, names


def by_name(collector: Collector) -> dict[str, Sent]:
    return {span.name: span for span in collector.spans}


def spill(request_id: str = "r1") -> SpillRecord:
    """Return a spill of the tenant whose calls `call_record` makes."""
    return SpillRecord(
        request_id_of(request_id, BLUE), 1_700_000_003.0, 0.5, token_count=256, size_bytes=4096
    )


def test_a_collector_on_this_machine_is_sent_to_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with RefusingProxy().serving() as proxy:
        proxy.name_in(monkeypatch, "http_proxy", "https_proxy")
        collector, _ = sent_for(call_record())
    assert collector.spans and proxy.asked == []


def test_a_call_and_its_stages_are_one_trace_under_the_callers_span() -> None:
    collector, [names] = sent_for(call_record(traceparent=KEPT))
    spans = by_name(collector)
    server = spans.pop("icehouse.v1.InferenceService/Stream")
    assert (server.trace_id, server.parent_id) == (TRACE_ID, CALLER_ID)
    assert names == SpanNames(TRACE_ID, f"00-{TRACE_ID}-{server.span_id}-01")
    assert list(spans) == ["tokenize", "queue", "restore", "prefill", "decode"]
    assert {span.parent_id for span in spans.values()} == {server.span_id}
    assert {span.trace_id for span in spans.values()} == {TRACE_ID}
    assert not server.is_error and "error.type" not in server.attributes
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 768
    assert server.attributes["icehouse.request.id"] == "r1"
    assert server.attributes["gen_ai.conversation.id"] == "s1"
    assert server.attributes["gen_ai.operation.name"] == "chat"
    assert server.attributes["gen_ai.provider.name"] == "icehouse"
    assert collector.resource["service.name"] == "icehouse" and collector.resource["service.version"] == "1.2"


def test_stages_follow_each_other_within_the_call() -> None:
    collector, _ = sent_for(call_record())
    spans = by_name(collector)
    server = spans.pop("icehouse.v1.InferenceService/Stream")
    times = [
        (round(s.start_s - server.start_s, 4), round(s.end_s - server.start_s, 4)) for s in spans.values()
    ]
    assert times == [(0.0, 0.0625), (0.0625, 0.25), (0.25, 0.75), (0.75, 2.0), (2.0, 4.0)]
    assert server.end_s - server.start_s == pytest.approx(4.125)


def test_a_cancelled_request_shows_what_it_came_to() -> None:
    record = call_record(code="CANCELLED", reason="CANCELLED", usage=None)
    assert [stage.name for stage in stages_of(record)] == ["tokenize", "queue", "restore"]
    assert [stage.name for stage in stages_of(dataclasses.replace(record, started=None))] == ["tokenize"]


@pytest.mark.parametrize(("code", "is_error"), [("INTERNAL", True), ("INVALID_ARGUMENT", False)])
def test_only_what_the_server_did_wrong_is_an_error(code: str, is_error: bool) -> None:
    collector, _ = sent_for(call_record(code=code, reason="WHY", usage=None, started=None))
    server = by_name(collector)["icehouse.v1.InferenceService/Stream"]
    assert server.is_error is is_error and server.attributes["error.type"] == "WHY"


@pytest.mark.parametrize("is_early", [True, False], ids=["before the end", "after the end"])
def test_a_spill_is_a_child_of_the_call_that_caused_it(is_early: bool) -> None:
    call, other = call_record(), call_record(request_id="r2")
    order = (other, spill(), call) if is_early else (other, call, spill())
    collector, _ = sent_for(*order)
    [written] = [span for span in collector.spans if span.name == "spill"]
    parents = {s.attributes["icehouse.request.id"]: s for s in collector.spans if not s.parent_id}
    assert (written.parent_id, written.trace_id) == (parents["r1"].span_id, parents["r1"].trace_id)
    assert written.end_s - written.start_s == pytest.approx(0.5)
    assert written.attributes == {"icehouse.tokens": 256, "icehouse.size": 4096}


def test_a_spill_is_not_anothers_whose_request_has_the_same_name() -> None:
    collector, _ = sent_for(call_record(tenant="red"), spill())
    assert [span.name for span in collector.spans].count("spill") == 0


@pytest.mark.parametrize("index", [0, 2], ids=["the request", "its third completion"])
def test_what_storage_tells_becomes_a_span_and_goes_on_to_the_engine(index: int) -> None:
    record = record_of(Shelf().chain([1, 2, 3])[0])
    told: list[Outcome] = []
    with collecting() as (collector, endpoint):
        room = TelemetryParts(load_config(flags={"telemetry.traces_endpoint": endpoint}, environ={}).config)
        assert room.watchers.tracer is not None
        outcomes = (
            Ticket(BlockPersisted(record, part_of(request_id_of("r1", BLUE), index), 1_700_000_003.0, 0.5)),
            Ticket(BlockPersisted(record)),
            Ticket[BlockPersisted](StorageFailure(SpillDropCause.DISK_FULL, hash=record.hash)),
        )
        for outcome in outcomes:
            room.watching(told.append)(outcome)
        room.watchers.tracer.trace(call_record())
        room.stop()
    server = by_name(collector)["icehouse.v1.InferenceService/Stream"]
    [written] = [span for span in collector.spans if span.name == "spill"]
    assert written.parent_id == server.span_id and written.attributes["icehouse.size"] == record.file_bytes
    assert told == list(outcomes)


def test_an_early_spill_is_told_once() -> None:
    collector, _ = sent_for(spill(), call_record(), call_record())
    assert [span.name for span in collector.spans].count("spill") == 1


def test_the_callers_decision_not_to_keep_a_trace_is_followed() -> None:
    collector, names = sent_for(spill(), call_record(traceparent=NOT_KEPT), spill())
    assert names == [None] and collector.spans == []


@pytest.mark.parametrize("trace", [("", ""), ("00-nonsense-01", ""), ("", "a=b")])
def test_without_a_usable_context_a_trace_begins_here(trace: tuple[str, str]) -> None:
    collector, [names] = sent_for(call_record(traceparent=trace[0], tracestate=trace[1]))
    server = by_name(collector)["icehouse.v1.InferenceService/Stream"]
    assert server.parent_id == "" and names is not None and names.trace_id == server.trace_id


def test_a_ratio_of_zero_keeps_nothing_that_begins_here() -> None:
    collector, names = sent_for(call_record(), call_record(traceparent=KEPT), ratio=0.0)
    assert names[0] is None and {span.trace_id for span in collector.spans} == {TRACE_ID}


def test_what_waits_for_calls_and_spills_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALL_COUNT_LIMIT", 2)
    monkeypatch.setattr(module, "_SPILL_COUNT_LIMIT", 2)
    calls = [call_record(request_id=f"r{i}") for i in range(3)]
    collector, _ = sent_for(*calls, spill("r0"), spill("r2"), *(spill("never") for _ in range(3)))
    assert [span.name for span in collector.spans].count("spill") == 1


def test_a_collector_that_is_away_does_not_hold_up_the_stop() -> None:
    with collecting() as (_, endpoint):
        pass
    spans = CallSpans(otlp_exporter(endpoint), sample_ratio=1.0, version="1.2")
    assert spans.trace(call_record()) is not None
    began = time.monotonic()
    spans.stop()
    assert time.monotonic() - began < 8


def test_traces_without_the_extra_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("icehouse_server.telemetry.call_spans"):
            raise ModuleNotFoundError("gone", name="opentelemetry")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    loaded = load_config(flags={"telemetry.traces_endpoint": "http://localhost:4317"}, environ={})
    with pytest.raises(ConfigError, match=r"opentelemetry.*pip install -e '\.\[otel\]'"):
        TelemetryParts(loaded.config)
