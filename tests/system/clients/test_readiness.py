"""Waiting for a server with the Python client: how it ends. The scenarios wait for servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
from icehouse.v1.server_service_pb2 import (
    SERVER_STATE_FAILED,
    SERVER_STATE_LOADING,
    SERVER_STATE_READY,
    Server,
)
from icehouse_client import IcehouseClientError
from icehouse_client.errors import error_from
from icehouse_client.readiness import ReadinessWait

Answer = Server | IcehouseClientError
Run = Callable[[ReadinessWait, Iterator[Answer]], Server]

LOADING, READY, FAILED = (
    Server(state=state) for state in (SERVER_STATE_LOADING, SERVER_STATE_READY, SERVER_STATE_FAILED)
)
ABSENT = error_from(grpc.StatusCode.UNAVAILABLE, "nobody listens", None)
LATE = error_from(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", None)


def told(answers: Iterator[Answer]) -> Server:
    answer = next(answers)
    if isinstance(answer, IcehouseClientError):
        raise answer
    return answer


def run(wait: ReadinessWait, answers: Iterator[Answer]) -> Server:
    return wait.run(lambda left_s: told(answers))


def run_async(wait: ReadinessWait, answers: Iterator[Answer]) -> Server:
    async def ask(left_s: float | None) -> Server:
        return told(answers)

    return asyncio.run(wait.run_async(ask))


@pytest.mark.parametrize("run", [run, run_async])
def test_a_server_is_asked_until_it_is_ready(run: Run) -> None:
    assert run(ReadinessWait(None), iter([ABSENT, LOADING, READY])) is READY


@pytest.mark.parametrize("run", [run, run_async])
@pytest.mark.parametrize(
    ("answers", "last"),
    [
        ([LATE], "it has not answered"),
        ([ABSENT, LATE], "UNAVAILABLE: nobody listens"),
        ([ABSENT, LOADING, LATE], "it is LOADING"),
    ],
)
def test_the_deadline_says_what_came_last(run: Run, answers: list[Answer], last: str) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        run(ReadinessWait(60.0), iter(answers))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert str(caught.value) == f"DEADLINE_EXCEEDED: the server was not ready in time: {last}"


@pytest.mark.parametrize("run", [run, run_async])
def test_nothing_is_asked_after_the_deadline(run: Run) -> None:
    with pytest.raises(IcehouseClientError) as caught:
        run(ReadinessWait(0.0), iter([ABSENT]))
    assert caught.value.message.endswith("UNAVAILABLE: nobody listens")


@pytest.mark.parametrize("run", [run, run_async])
def test_what_waiting_cannot_help_is_told_at_once(run: Run) -> None:
    stranger = error_from(grpc.StatusCode.UNAUTHENTICATED, "who are you?", None)
    with pytest.raises(IcehouseClientError) as caught:
        run(ReadinessWait(None), iter([LOADING, stranger]))
    assert caught.value is stranger
    with pytest.raises(IcehouseClientError, match="engine has failed") as caught:
        run(ReadinessWait(None), iter([LOADING, FAILED]))
    assert (caught.value.code.name, caught.value.reason) == ("INTERNAL", "ENGINE_FAILED")
