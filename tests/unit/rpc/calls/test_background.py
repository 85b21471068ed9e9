"""Background tasks: a failure is told at once and stays with its task."""

from __future__ import annotations

import asyncio
import logging

import pytest
from icehouse_server.rpc.calls import background


async def test_a_failure_is_logged_when_it_happens_and_not_raised_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise OverflowError("date value out of range")

    task = background.start(fail(), name="security")
    await asyncio.wait((task,))
    await asyncio.sleep(0)
    [record] = caplog.records
    assert (record.getMessage(), vars(record)["task"], record.levelno) == (
        "background_task_failed",
        "security",
        logging.ERROR,
    )
    assert record.exc_info is not None and "date value" in str(record.exc_info[1])
    await background.end(task)


async def test_a_task_that_fails_while_it_ends_does_not_fail_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the endpoint is gone")

    task = background.start(fail(), name="kv-events-zmq")
    await asyncio.sleep(0)
    await background.end(task)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["background_task_failed"]


async def test_an_ordinary_end_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    task = background.start(asyncio.Event().wait(), name="health")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await background.end(task)
    assert task.cancelled() and not caplog.records


async def test_who_is_cancelled_while_waiting_for_an_end_is_cancelled() -> None:
    stays = asyncio.Event()

    async def stubborn() -> None:
        while not stays.is_set():
            try:
                await stays.wait()
            except asyncio.CancelledError:
                continue

    task = background.start(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await background.end(task)
    stays.set()
    await task
