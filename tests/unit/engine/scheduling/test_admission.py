"""Refusals before the wait: full in numbers, late at once; and retry delays from measured rates."""

from __future__ import annotations

from icehouse_server.domain.events import Failed, Finished
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import Overloaded, Reason

from tests.unit.engine.test_loop import SteppedLoop


def measured(served: SteppedLoop, *, prefill_tokens_per_s: float, service_s: float = 0.0) -> None:
    """What a busy engine has measured of itself."""
    served.loop.counters.stats.prefill_tokens_per_s = prefill_tokens_per_s
    served.loop.counters.service.value = service_s


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    served = SteppedLoop(running_limit=1, context_token_limit=1000)
    measured(served, prefill_tokens_per_s=10.0)
    served.submit("long", [1] * 500, max_output_tokens=1)
    served.submit("hurried", [1] * 4, deadline_time=served.clock.now + 20.0)
    served.submit("patient", [1] * 4, deadline_time=served.clock.now + 200.0)
    served.loop.step()
    end = served.recorder.end_of("hurried")
    assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
    assert end.error.reason is Reason.DEADLINE_UNREACHABLE
    assert float(end.error.metadata["predicted_ttft_s"]) > 20.0
    assert end.error.metadata["deadline_s"] == "20.000" and end.error.retry_after_s
    served.run()
    assert isinstance(served.recorder.end_of("patient"), Finished)


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    served = SteppedLoop(running_limit=1, context_token_limit=1000)
    served.submit("long", [1] * 500, max_output_tokens=1)
    served.submit("hurried", [1] * 4, deadline_time=served.clock.now + 0.5)
    served.loop.step()
    assert served.recorder.end_of("hurried") is None


def test_the_retry_delay_follows_the_measured_service_time() -> None:
    delays = []
    for service_s in (2.0, 20.0):
        served = SteppedLoop(waiting_limit=2, running_limit=1)
        measured(served, prefill_tokens_per_s=1000.0, service_s=service_s)
        for name in "abcd":
            served.submit(name)
        served.loop.step()
        end = served.recorder.end_of("d")
        assert isinstance(end, Failed) and end.error.reason is Reason.QUEUE_FULL
        assert end.error.retry_after_s is not None
        assert end.error.metadata["queue_position"] == "2"
        delays.append(end.error.retry_after_s)
    assert delays[1] > 5 * delays[0] > 0


def test_tokens_bound_the_queue_too() -> None:
    served = SteppedLoop(running_limit=1, waiting=WaitingLimits(request_limit=10, token_limit=20))
    for name in "abc":
        served.submit(name, [1] * 12)
    served.loop.step()
    end = served.recorder.end_of("c")
    assert isinstance(end, Failed) and end.error.metadata["waiting_token_limit"] == "20"


def predicted_s(served: SteppedLoop, *, deadline_s: float) -> float:
    """Submit a prompt that must be refused for its deadline and return what was predicted for it."""
    served.submit("hurried", [1] * 4, deadline_time=served.clock.now + deadline_s)
    served.loop.step()
    end = served.recorder.end_of("hurried")
    assert isinstance(end, Failed) and end.error.reason is Reason.DEADLINE_UNREACHABLE
    return float(end.error.metadata["predicted_ttft_s"])


def test_a_prompt_that_is_being_computed_comes_before_a_newcomer() -> None:
    served = SteppedLoop(context_token_limit=1000)
    served.submit("long", [1] * 500, max_output_tokens=1)
    served.loop.step()
    assert served.scheduler.waiting_count == 0
    measured(served, prefill_tokens_per_s=10.0)
    assert predicted_s(served, deadline_s=5.0) > 40.0


def test_beside_those_who_decode_prefill_is_expected_at_half_its_rate() -> None:
    predictions = []
    for is_decoding in (False, True):
        served = SteppedLoop(running_limit=1, context_token_limit=1000)
        served.submit("first", [1] * 2, max_output_tokens=50)
        while is_decoding and not served.scheduler.decoding_count:
            served.loop.step()
        served.submit("waits", [1] * 498, max_output_tokens=1)
        measured(served, prefill_tokens_per_s=10.0)
        predictions.append(predicted_s(served, deadline_s=5.0))
    assert predictions[1] > 1.9 * predictions[0]


def test_the_retry_delay_has_bounds() -> None:
    for service_s, expected_s in ((1e6, 60.0), (1e-6, 0.1)):
        served = SteppedLoop(waiting_limit=1, running_limit=1)
        measured(served, prefill_tokens_per_s=1e9, service_s=service_s)
        for name in "abc":
            served.submit(name)
        served.loop.step()
        end = served.recorder.end_of("c")
        assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
        assert end.error.retry_after_s == expected_s


def test_a_retry_is_never_told_to_come_at_once() -> None:
    # Nothing is before a request of higher priority, and yet there is no place for it.
    served = SteppedLoop(waiting_limit=1, running_limit=1)
    measured(served, prefill_tokens_per_s=1e9)
    served.submit("runs")
    served.submit("waits")
    served.submit("urgent", priority=5)
    served.loop.step()
    end = served.recorder.end_of("urgent")
    assert isinstance(end, Failed) and isinstance(end.error, Overloaded)
    assert end.error.metadata["queue_position"] == "0" and end.error.retry_after_s == 0.1
