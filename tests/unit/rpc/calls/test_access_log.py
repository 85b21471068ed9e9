"""Access log: every call that was worked on has its line; refusals without end fill no disk."""

from __future__ import annotations

import logging

import pytest
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole
from icehouse_server.rpc.calls.watchers import REFUSAL_LINE_BURST_COUNT, REFUSAL_LINES_PER_S, AccessLog

from tests.fixtures.engine import FakeClock
from tests.fixtures.telemetry.facts import call_record


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="icehouse.access")
    return caplog


def refusal(**facts):
    return call_record(
        code="UNAUTHENTICATED", reason="CREDENTIALS_MISSING", started=None, usage=None, **facts
    )


def test_refusals_are_told_so_many_a_second_and_the_others_counted(told: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = AccessLog(clock)
    for _ in range(1000):
        log.write(refusal(tenant=""), trace_id="")
    assert len(told.records) == REFUSAL_LINE_BURST_COUNT
    clock.now += 1.0
    for _ in range(1000):
        log.write(refusal(tenant=""), trace_id="")
    later = told.records[REFUSAL_LINE_BURST_COUNT:]
    assert len(later) == REFUSAL_LINES_PER_S
    assert [getattr(line, "left_out", 0) for line in later[:2]] == [1000 - REFUSAL_LINE_BURST_COUNT, 0]


def test_calls_that_were_worked_on_all_have_their_line(told: pytest.LogCaptureFixture) -> None:
    log = AccessLog(FakeClock())
    for _ in range(1000):
        log.write(call_record(code="OK", reason=""), trace_id="")
        log.write(call_record(code="DEADLINE_EXCEEDED", reason="DEADLINE_EXCEEDED"), trace_id="")
    assert len(told.records) == 2000


def test_nobodys_refusals_leave_no_tenants_out(told: pytest.LogCaptureFixture) -> None:
    log = AccessLog(FakeClock())
    for _ in range(1000):
        log.write(refusal(tenant=""), trace_id="")
    for tenant in ("red", "blue"):
        token = callers.current.set(Caller(tenant, CallerRole.TENANT))
        log.write(refusal(tenant=tenant), trace_id="")
        callers.current.reset(token)
    assert [vars(line)["tenant"] for line in told.records[-2:]] == ["red", "blue"]
    assert callers.current.get() is UNPROVED
