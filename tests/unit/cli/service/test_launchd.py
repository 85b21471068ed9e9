"""launchd's agent: the property list says what is run, whatever the paths hold."""

from __future__ import annotations

import plistlib
from pathlib import Path

import pytest
from icehouse_server.cli.service.managers import LABEL, Launchd, ServiceDefinition, ServiceError, is_untouched

from tests.tidy.tree import ROOT

COMMAND = ("/opt/ice & <house>/bin/icehouse", "serve", "modèle", "--config", '/tmp/"a" b.toml')
LAUNCHD = Launchd(Path("/Users/you"))


def agent(**environment: str) -> dict[str, object]:
    text = LAUNCHD.text_of(ServiceDefinition(COMMAND, environment, 91))
    assert is_untouched(text) and text.startswith("<?xml")
    return dict(plistlib.loads(text.encode()))


def test_the_agent_runs_the_command() -> None:
    told = agent(ICEHOUSE_LOG_FORMAT="json")
    assert told["ProgramArguments"] == list(COMMAND) and told["ExitTimeOut"] == 91
    assert told["EnvironmentVariables"] == {"ICEHOUSE_LOG_FORMAT": "json"}
    assert "EnvironmentVariables" not in agent()


def test_it_says_what_the_agent_of_the_checkout_says() -> None:
    ours = agent(ICEHOUSE_LOG_FORMAT="json")
    written = plistlib.loads((ROOT / "deploy" / "launchd" / f"{LABEL}.plist").read_bytes())
    own = {"ProgramArguments", "ExitTimeOut"}
    assert {k: v for k, v in ours.items() if k not in own} == {
        k: v for k, v in written.items() if k not in own
    }


def test_text_that_xml_cannot_hold_is_refused() -> None:
    with pytest.raises(ServiceError, match="property list"):
        LAUNCHD.text_of(ServiceDefinition(("/bin/icehouse", "a\x01b"), {}, 1))
