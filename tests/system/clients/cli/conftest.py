"""Terminal as the commands' tests have it: without colours, and wide enough for every line."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
