"""The slowest recent requests: few, recent, and of nobody else."""

from __future__ import annotations

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import server_service_pb2
from icehouse.v1.slow_request_pb2 import SlowRequest
from icehouse_server.rpc.calls.watchers import SLOW_COUNT_LIMIT, SLOW_RECENT_S, SLOW_SHOWN_COUNT, SlowRequests
from icehouse_server.rpc.messages.proto_map import to_proto

from tests.fixtures.telemetry.facts import call_record
from tests.unit.rpc.conftest import FakeClock, RunningServer


def test_the_slowest_come_first_and_only_so_many() -> None:
    slow = SlowRequests(FakeClock())
    for index in range(30):
        slow.call_ended(call_record(request_id=f"r{index}", duration_s=float((index * 7) % 30)))
    shown = slow.slowest(tenant=None)
    assert [s.total_duration_s for s in shown] == [29.0 - i for i in range(SLOW_SHOWN_COUNT)]


def test_old_ones_are_forgotten_by_age_and_by_number() -> None:
    clock = FakeClock()
    slow = SlowRequests(clock)
    slow.call_ended(call_record(request_id="old", duration_s=99.0))
    clock.now += SLOW_RECENT_S + 1
    slow.call_ended(call_record(request_id="new", duration_s=1.0))
    assert [s.request_id for s in slow.slowest(tenant=None)] == ["new"]
    for _ in range(SLOW_COUNT_LIMIT):
        slow.call_ended(call_record(request_id="fast", duration_s=0.5))
    assert {s.request_id for s in slow.slowest(tenant=None)} == {"fast"}


def test_a_tenant_sees_its_own_and_nothing_that_never_ran() -> None:
    slow = SlowRequests(FakeClock())
    slow.call_ended(call_record(request_id="b", tenant="blue"))
    slow.call_ended(call_record(request_id="g", tenant="green"))
    slow.call_ended(call_record(request_id="refused", started=None, usage=None))
    assert [s.request_id for s in slow.slowest(tenant="green")] == ["g"]
    assert {s.request_id for s in slow.slowest(tenant=None)} == {"b", "g"}


async def test_the_counters_show_where_the_time_went(served: RunningServer) -> None:
    await served.inference.Generate(
        messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2, request_id="r")
    )
    stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    [shown] = stats.slowest_requests
    assert (shown.request_id, shown.method, shown.code) == (
        "r",
        "icehouse.v1.InferenceService/Generate",
        "OK",
    )
    stages = (shown.queue_duration, shown.restore_duration, shown.prefill_duration, shown.decode_duration)
    assert [stage.ToTimedelta().total_seconds() for stage in stages] == [0.5, 0.25, 1.5, 2.5]
    assert (shown.prompt_tokens, shown.cached_tokens, shown.output_tokens) == (2, 3, 2)


def test_a_request_that_did_not_end_says_only_what_is_known() -> None:
    slow = SlowRequests(FakeClock())
    slow.call_ended(call_record(code="CANCELLED", usage=None))
    message = to_proto(slow.slowest(tenant=None)[0], SlowRequest)
    assert message.HasField("queue_duration") and not message.HasField("decode_duration")
