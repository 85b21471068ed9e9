"""The whole house watched from outside: spans at a collector, metrics at a port, a trace id in the log."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_client.log_lines import fields_of
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.telemetry.collector import Sent, collecting
from tests.fixtures.whole_server import WholeServer, whole_server

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SMALL = {
    "cache__block_token_count": 16,
    "cache__ram_bytes": 64 * 1024,
    "cache__min_prefix_token_count": 0,
    "cache__restore_or_recompute": False,
}


async def generate(served: WholeServer, text: str, request_id: str) -> grpc.aio.Call:
    metadata = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"),)
    request = messages.GenerateRequest(prompt={"text": text}, max_output_tokens=3, request_id=request_id)
    call = served.inference.Generate(request, metadata=metadata)
    await call
    return call


def children(spans: list[Sent], request_id: str) -> dict[str, Sent]:
    [server] = [span for span in spans if span.attributes.get("icehouse.request.id") == request_id]
    assert (server.trace_id, server.parent_id) == (TRACE_ID, CALLER_ID)
    found = {span.name: span for span in spans if span.parent_id == server.span_id}
    for span in found.values():
        assert server.start_s - 0.001 <= span.start_s <= span.end_s
        assert span.name == "spill" or span.end_s <= server.end_s + 0.001
    return found


async def test_a_request_is_one_trace_down_to_the_blocks_it_drove_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    with collecting() as (collector, endpoint), caplog.at_level(logging.INFO, "icehouse.access"):
        settings: dict[str, Any] = {**SMALL, "telemetry__traces_endpoint": endpoint}
        async with whole_server(model, tmp_path / "blocks", **settings) as served:
            for number in range(6):
                call = await generate(served, f"{number} once upon a time " * 12, f"r{number}")
            trailers = dict(await call.trailing_metadata())
            await generate(served, "0 once upon a time " * 12, "again")
    first, last = children(collector.spans, "r0"), children(collector.spans, "r5")
    assert {"tokenize", "queue", "prefill", "decode"} <= set(first) and "restore" not in first
    assert "spill" in last, "the sixth prompt did not drive a block of an earlier one out of RAM"
    assert last["spill"].attributes["icehouse.size"] > 0
    restore = children(collector.spans, "again")["restore"]
    assert restore.attributes["icehouse.ssd.tokens"] > 0
    assert trailers["traceresponse"].startswith(f"00-{TRACE_ID}-")
    assert "once upon" not in str(collector.spans), "a span tells a prompt"
    assert {fields_of(record)["trace_id"] for record in caplog.records} == {TRACE_ID}


async def test_metrics_follow_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model_dir(tmp_path, "llama")
    with caplog.at_level(logging.INFO, "icehouse.boot"):
        async with whole_server(model, tmp_path / "blocks", telemetry__metrics_port=0, **SMALL) as served:
            await generate(served, "once upon a time", "r1")
            await served.served.rpc.observation.sample()
            await generate(served, "once upon a time", "r2")
            [url] = [fields_of(r)["url"] for r in caplog.records if r.message == "metrics_opened"]
            text = await asyncio.to_thread(
                lambda: urllib.request.urlopen(str(url), timeout=BOUND_S).read().decode()
            )
    assert "once upon" not in text, "a metric tells a prompt"
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ended = {
        s.labels["icehouse_outcome"]: s.value for s in families["icehouse_engine_requests_ended"].samples
    }
    assert ended["finished"] >= 1
    calls = families["grpc_server_call_duration_seconds"].samples
    assert [s.value for s in calls if s.name.endswith("_count") and s.labels["grpc_status"] == "OK"] == [2]
