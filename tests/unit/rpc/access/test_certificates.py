"""TLS and client certificates, and new ones taken into use while streams run."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_server.config import SecurityConfig
from icehouse_server.domain.events import Delta
from icehouse_server.errors import Reason, StartError

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority, dns, uri
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import finished, hanging
from tests.unit.rpc.conftest import RunningServer, channel_options, running

REQUEST = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
SEARCH = uri("spiffe://corp.example/team/search")


@pytest.fixture
def authority() -> Authority:
    return Authority()


def tls(authority: Authority, folder: Path, *, mutual: bool = False, **settings: Any) -> SecurityConfig:
    """Write the server's files and return the settings that name them."""
    certificate, key = authority.write_server(folder, "first")
    if mutual:
        (folder / "ca.pem").write_bytes(authority.pem)
        settings["tls_client_ca"] = str(folder / "ca.pem")
    return SecurityConfig(tls_certificate=str(certificate), tls_key=str(key), **settings)


def channel_of(
    served: RunningServer, authority: Authority, *, client: tuple[bytes, bytes] | None = None
) -> grpc.aio.Channel:
    """Return a channel that trusts `authority`, with a client certificate and key if given."""
    certificate, key = client or (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    return grpc.aio.secure_channel(served.server.address, credentials, options=channel_options())


def inference(channel: grpc.aio.Channel) -> Any:
    return inference_service_pb2_grpc.InferenceServiceStub(channel)


async def served_name(served: RunningServer) -> str:
    """Return the common name of the certificate that a new connection is shown."""

    def look() -> str:
        host, _, port = served.server.address.rpartition(":")
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=BOUND_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        subject = x509.load_der_x509_certificate(shown).subject
        return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    return await asyncio.to_thread(look)


async def test_tls_serves_those_who_trust_it(authority: Authority, tmp_path: Path) -> None:
    async with running(security=tls(authority, tmp_path)) as served:
        async with channel_of(served, authority) as channel:
            assert (await inference(channel).Generate(REQUEST)).text == " w0"
        async with channel_of(served, Authority("another")) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference(stranger).Generate(REQUEST, timeout=BOUND_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_plain_text_is_not_spoken_on_a_tls_port(authority: Authority, tmp_path: Path) -> None:
    async with running(security=tls(authority, tmp_path)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.inference.Generate(REQUEST, timeout=BOUND_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_is_served_and_running_streams_go_on(
    authority: Authority, tmp_path: Path
) -> None:
    async with running(security=tls(authority, tmp_path)) as served:
        served.engine.script = hanging
        async with channel_of(served, authority) as old:
            stream = inference(old).Stream(
                messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=4)
            )
            assert (await stream.read()).WhichOneof("event") == "started"
            assert (await stream.read()).delta.text == "hello"
            assert await served_name(served) == "first"

            authority.write_server(tmp_path, "second")
            await served.server.security.refresh()
            assert await served_name(served) == "second"

            [request] = served.engine.submitted
            served.engine.publish(request, Delta(" again", (2,)), finished(request))
            assert (await stream.read()).delta.text == " again"
            assert (await stream.read()).WhichOneof("event") == "finished"
            assert await stream.code() is grpc.StatusCode.OK


async def test_half_replaced_files_change_nothing_and_are_told_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(security=tls(authority, tmp_path)) as served:
        other, _ = authority.issue("second")
        old = (tmp_path / "server.pem").read_bytes()
        with caplog.at_level(logging.ERROR):
            for content in (other, other, b"", old):
                (tmp_path / "server.pem").write_bytes(content)
                await served.server.security.refresh()
                assert await served_name(served) == "first"
            (tmp_path / "server.key").unlink()
            await served.server.security.refresh()
        assert await served_name(served) == "first"
        assert len([r for r in caplog.records if r.getMessage() == "old_secrets_kept"]) == 3


@pytest.mark.parametrize("damage", ["missing", "no key of it", "locked key", "no authority"])
async def test_unusable_files_stop_the_start(authority: Authority, tmp_path: Path, damage: str) -> None:
    security = tls(authority, tmp_path, mutual=True)
    if damage == "missing":
        (tmp_path / "server.pem").unlink()
    elif damage == "no key of it":
        (tmp_path / "server.key").write_bytes(authority.issue("x")[1])
    elif damage == "locked key":
        (tmp_path / "server.key").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII=\n")
    else:
        (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(StartError) as caught:
        async with running(security=security):
            pass
    assert caught.value.reason is Reason.CERTIFICATE_INVALID


async def test_a_client_certificate_names_the_tenant(authority: Authority, tmp_path: Path) -> None:
    security = tls(authority, tmp_path, mutual=True)
    cases = {
        "spiffe://corp.example/team/search": (dns("search.corp.example"), SEARCH),
        "ads.corp.example": (dns("ads.corp.example"), dns("other.corp.example")),
    }
    async with running(security=security) as served:
        for tenant, names in cases.items():
            client = authority.issue("common names mean nothing", *names)
            async with channel_of(served, authority, client=client) as channel:
                await inference(channel).Generate(REQUEST)
            assert served.engine.submitted[-1].tenant == tenant


async def test_who_shows_no_certificate_or_a_foreign_one_is_not_served(
    authority: Authority, tmp_path: Path
) -> None:
    async with running(security=tls(authority, tmp_path, mutual=True)) as served:
        for client in (None, Authority("another").issue("x", SEARCH)):
            async with channel_of(served, authority, client=client) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await inference(channel).Generate(REQUEST, timeout=BOUND_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.engine.submitted == []


async def test_a_certificate_without_a_name_of_its_own_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    async with running(security=tls(authority, tmp_path, mutual=True)) as served:
        async with channel_of(served, authority, client=authority.issue("only a common name")) as channel:
            refusal = await refused(inference(channel).Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.UNAUTHENTICATED,
            Reason.CREDENTIALS_INVALID,
        )
        long = authority.issue("x", uri("spiffe://corp.example/" + "x" * 200))
        async with channel_of(served, authority, client=long) as channel:
            assert (await refused(inference(channel).Generate(REQUEST))).reason == "CREDENTIALS_INVALID"


async def test_new_client_authorities_are_asked_from_the_next_connection_on(
    authority: Authority, tmp_path: Path
) -> None:
    async with running(security=tls(authority, tmp_path, mutual=True)) as served:
        successor = Authority("successor")
        client = successor.issue("x", SEARCH)
        async with channel_of(served, authority, client=client) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference(channel).Generate(REQUEST, timeout=BOUND_S)
        (tmp_path / "ca.pem").write_bytes(authority.pem + successor.pem)
        await served.server.security.refresh()
        async with channel_of(served, authority, client=client) as channel:
            assert (await inference(channel).Generate(REQUEST)).text == " w0"


async def test_an_open_key_is_warned_of(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    security = tls(authority, tmp_path)
    (tmp_path / "server.key").chmod(0o644)
    async with running(security=security):
        pass
    assert "open_private_key_read" in caplog.text
