"""`icehouse token new` makes what the server lets in."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.cli.main import app
from icehouse_server.errors import ConfigError
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import TokenFile
from typer.testing import CliRunner


def made(*arguments: str) -> tuple[str, str]:
    """Return the token and the line that the command prints."""
    done = CliRunner().invoke(app, ["token", "new", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    token, line = done.stdout.splitlines()
    return token, line


@pytest.mark.parametrize(
    ("arguments", "role"), [((), CallerRole.TENANT), (("--operator",), CallerRole.OPERATOR)]
)
def test_the_printed_line_lets_the_printed_token_in(
    tmp_path: Path, arguments: tuple[str, ...], role: CallerRole
) -> None:
    token, line = made("--tenant", "team/search@corp", "--days", "30", *arguments)
    assert token not in line and "expires=" in line
    (tmp_path / "tokens").write_text(line + "\n")
    file = TokenFile(tmp_path / "tokens")
    file.refresh()
    caller = file.find(token, now=0)
    assert caller is not None and (caller.tenant, caller.role) == ("team/search@corp", role)
    assert file.find(token, now=1e11) is None


def test_a_tenant_that_no_line_could_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tenant"):
        CliRunner().invoke(app, ["token", "new", "--tenant", "two words"], catch_exceptions=False)
