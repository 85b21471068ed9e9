"""`icehouse health`: exit codes that a container's probe can go by."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.config import SecurityConfig

from tests.fixtures.rpc.authority import Authority
from tests.unit.cli.client.test_generate import invoke, written
from tests.unit.rpc.conftest import running


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")


async def test_a_server_that_serves_is_0_and_one_that_loads_is_1() -> None:
    async with running() as served:
        ready = await invoke("health", "--address", served.server.address)
    async with running(ready=False) as served:
        loading = await invoke("health", "--address", served.server.address)
    nobody = await invoke("health", "--address", "127.0.0.1:1")
    assert (ready.exit_code, ready.stdout) == (0, "SERVING\n")
    assert (loading.exit_code, loading.stdout) == (1, "NOT_SERVING\n")
    assert nobody.exit_code == 1 and "no server answers" in nobody.output


async def test_a_server_with_tls_and_tokens_is_asked_without_a_token(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.write_server(tmp_path)
    ca = written(tmp_path, "ca.pem", authority.pem)
    written(tmp_path, "tokens", b"sha256=" + b"0" * 64 + b" tenant=a\n")
    security = SecurityConfig(
        tls_certificate=str(certificate), tls_key=str(key), token_file=str(tmp_path / "tokens")
    )
    async with running(security=security) as served:
        environ = {"ICEHOUSE_CLIENT_ADDRESS": served.server.address, "ICEHOUSE_CLIENT_CA": ca}
        asked = await invoke("health", environ=environ)
        plain = await invoke("health", "--address", served.server.address)
    assert (asked.exit_code, asked.stdout) == (0, "SERVING\n"), asked.output
    assert plain.exit_code == 1 and "wants --ca" in plain.output
