"""The switch of the status page."""

from __future__ import annotations

import pytest
from icehouse_server.bootstrap.telemetry import TelemetryParts
from icehouse_server.config import load_config
from icehouse_server.errors import ConfigError


def test_a_page_without_a_port_is_refused() -> None:
    config = load_config(flags={"telemetry.status_page_enabled": True}, environ={}).config
    with pytest.raises(ConfigError, match=r"set telemetry\.metrics_port"):
        TelemetryParts(config)
