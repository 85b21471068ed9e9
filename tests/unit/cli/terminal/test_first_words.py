"""First words: which events of a start are shown, and as what."""

from __future__ import annotations

import io
import logging

import pytest
from icehouse_server.cli.terminal.first_words import FirstWords, first_words, ready_text
from icehouse_server.config import load_config
from rich.console import Console


def event(message: str, **fields: object) -> logging.LogRecord:
    logger = logging.Logger("icehouse.boot")
    return logger.makeRecord("icehouse.boot", logging.INFO, "file.py", 1, message, (), None, extra=fields)


@pytest.mark.parametrize(
    ("address", "http", "shown"),
    [
        ("127.0.0.1:50051", None, "Ready: localhost:50051 · try: icehouse chat"),
        (
            "127.0.0.1:50051",
            "http://127.0.0.1:8000",
            "Ready: localhost:50051 · http://localhost:8000/v1 · try: icehouse chat",
        ),
        ("127.0.0.1:7", None, "Ready: localhost:7 · try: icehouse chat --address localhost:7"),
        ("unix:/run/s", None, "Ready: unix:/run/s · try: icehouse chat --address unix:/run/s"),
    ],
)
def test_ready_says_where_and_what_to_try(address: str, http: str | None, shown: str) -> None:
    assert ready_text(address, http) == shown


def test_a_download_is_told_with_its_size_and_unknown_sizes_are_left_out() -> None:
    screen = io.StringIO()
    words = FirstWords(Console(file=screen, force_terminal=True, width=80))
    words.begin()
    words.emit(event("download_started", model="org/a", size_bytes=3 << 30))
    words.emit(event("model_found", model="org/a[b]", size_bytes=0))
    words.emit(event("tokenizer_read", duration_s=1))
    words.emit(event("cache_opened", was_clean=False))
    words.end()
    text = screen.getvalue()
    assert "Downloading org/a (3 GiB)" in text and "Loading org/a[b] …" in text
    assert "was_clean" not in text and "cache_opened" not in text


def test_without_a_terminal_nothing_changes(capfd: pytest.CaptureFixture[str]) -> None:
    before = list(logging.getLogger().handlers)
    with first_words(load_config(environ={})):
        assert logging.getLogger().handlers == before
    assert capfd.readouterr().err == ""
