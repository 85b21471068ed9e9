"""What grpc's own log tells of callers that leave, and what it goes on telling."""

import asyncio
import logging

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from icehouse_server.rpc.rpc_server import CORE_LOGGER_NAME, quiet_lost_answers


def lines_of_core(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == CORE_LOGGER_NAME]


def log_in_core(error: Exception) -> None:
    try:
        raise error
    except Exception:
        cygrpc._LOGGER.exception("%s raised in core", type(error).__name__)


def test_an_answer_whose_caller_has_left_is_a_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    quiet_lost_answers()
    quiet_lost_answers()
    with caplog.at_level(logging.DEBUG):
        log_in_core(cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 3"))
    assert not lines_of_core(caplog)
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("DEBUG", None)


async def test_what_else_the_core_logs_stays(caplog: pytest.LogCaptureFixture) -> None:
    quiet_lost_answers()
    log_in_core(cygrpc.UsageError("twice"))

    async def fails(request: bytes, context: object) -> bytes:
        raise ArithmeticError("ours")

    handler = grpc.method_handlers_generic_handler("S", {"M": grpc.unary_unary_rpc_method_handler(fails)})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(channel.unary_unary("/S/M")(b""), 20)
    await server.stop(None)
    first, second = lines_of_core(caplog)
    assert "UsageError" in first
    assert "ArithmeticError" in second
