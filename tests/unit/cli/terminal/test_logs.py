"""Log lines for people and for machines."""

import json
import logging
from collections.abc import Iterator

import pytest
from icehouse_client.log_lines import JsonFormatter, TextFormatter
from icehouse_server.cli.terminal.logs import setup_logging
from icehouse_server.config import LogConfig


def record(**extra: object) -> logging.LogRecord:
    return logging.Logger("icehouse.boot").makeRecord(
        "icehouse.boot", logging.INFO, "file.py", 1, "loaded %s", ("it",), None, extra=extra
    )


def test_text_shows_the_fields_after_the_message() -> None:
    line = TextFormatter().format(record(path="a b", duration_s=1.23456, count=3))
    assert line[8:] == ' loaded it path="a b" duration_s=1.23 count=3'


def test_json_is_one_object_with_every_field() -> None:
    event = json.loads(JsonFormatter().format(record(count=3, code="OK")))
    assert (event["message"], event["count"], event["code"]) == ("loaded it", 3, "OK")
    assert event["time"].endswith("Z") and event["level"] == "info"


def test_an_exception_keeps_its_traceback() -> None:
    try:
        raise ValueError("deep")
    except ValueError as error:
        broken = record()
        broken.exc_info = (ValueError, error, error.__traceback__)
    assert "deep" in json.loads(JsonFormatter().format(broken))["exception"]
    assert TextFormatter().format(broken).endswith("ValueError: deep")


@pytest.fixture
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "icehouse", "icehouse_server")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers = handlers
        logger.setLevel(level)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", ["icehouse.boot", "icehouse_server.rpc.access.credentials"])
def test_the_level_is_that_of_all_our_loggers_and_of_no_other(name: str) -> None:
    setup_logging(LogConfig(level="debug"))
    assert logging.getLogger(name).isEnabledFor(logging.DEBUG)
    setup_logging(LogConfig(level="error"))
    assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert logging.getLogger("urllib3").isEnabledFor(logging.WARNING)
