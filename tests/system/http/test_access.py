"""Who may call through the front: the server's own tokens and certificate hold there too."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import pytest
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority
from tests.system.http.served import CHAT, ServedFront, body

TOKEN = new_token()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[str, str]:
    """Options for a file of tokens."""
    file = tmp_path / "tokens"
    file.write_text(line_of(TOKEN, tenant="search", role=CallerRole.TENANT, expire_date=None))
    file.chmod(0o600)
    return "--token-file", str(file)


def tls(folder: Path) -> tuple[tuple[str, ...], ssl.SSLContext]:
    """Return options for a certificate of 127.0.0.1, and what clients trust it by."""
    authority = Authority()
    certificate, key = authority.write_server(folder)
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    return options, ssl.create_default_context(cadata=authority.pem.decode())


def test_a_token_decides_who_calls_and_who_may_not(
    model: Path, tmp_path: Path, tokens: tuple[str, str]
) -> None:
    front = ServedFront(model, tmp_path, *tokens)
    with front.server as server, httpx2.Client(base_url=front.url, timeout=BOUND_S) as http:
        server.wait_until_serving()
        refused = http.post(CHAT, json=body())
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "CREDENTIALS_MISSING"
        wrong = http.get("/v1/models", headers={"x-api-key": "another"})
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "CREDENTIALS_INVALID"
        for known in ({"authorization": f"Bearer {TOKEN}"}, {"x-api-key": TOKEN}):
            assert http.post(CHAT, json=body(), headers=known).status_code == 200
    assert front.log.count("tenant=search") >= 2
    assert TOKEN not in front.log and "What is ice" not in front.log


def test_beyond_loopback_it_speaks_https_with_the_servers_certificate(
    model: Path, tmp_path: Path, tokens: tuple[str, str]
) -> None:
    options, trusted = tls(tmp_path)
    front = ServedFront(model, tmp_path, *tokens, *options, "--http-host", "0.0.0.0", scheme="https")
    with front.server as server, httpx2.Client(base_url=front.url, timeout=BOUND_S, verify=trusted) as http:
        server.wait_until_serving()
        answer = http.post(CHAT, json=body(), headers={"x-api-key": TOKEN})
        assert answer.status_code == 200
        with pytest.raises(httpx2.RemoteProtocolError):
            httpx2.get(f"http://127.0.0.1:{front.port}/health", timeout=BOUND_S)


def test_on_loopback_it_needs_no_tls_whatever_the_server_has(model: Path, tmp_path: Path) -> None:
    options, _ = tls(tmp_path)
    front = ServedFront(model, tmp_path, *options)
    with front.server as server:
        server.wait_until_serving()
        assert httpx2.post(f"{front.url}{CHAT}", json=body(), timeout=BOUND_S).status_code == 200


@pytest.mark.parametrize("is_open", [True, False], ids=["an open address", "known by certificate alone"])
def test_a_front_that_nobody_guards_or_may_pass_is_refused_before_any_model_is_looked_for(
    model: Path, tmp_path: Path, is_open: bool
) -> None:
    options: tuple[str, ...] = ("--http-host", "0.0.0.0")
    reason = "lacks TLS"
    if not is_open:
        (tmp_path / "ca.pem").write_bytes(Authority().pem)
        options, reason = (*tls(tmp_path)[0], "--tls-client-ca", str(tmp_path / "ca.pem")), "--token-file"
    front = ServedFront(model, tmp_path, *options)
    with front.server as server:
        assert server.wait() == 1
    assert reason in front.log and "model_found" not in front.log
