"""HTTPS: a renewed certificate is served without a restart, and half of one changes nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import pytest
from icehouse_http.serving.certificate import CertificateWatch, TlsFiles
from icehouse_http.serving.server import Listening, server_of
from icehouse_http.settings import Settings

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority


def put(folder: Path, authority: Authority) -> TlsFiles:
    """Write a new pair there, by replacing what is there."""
    (folder / "new").mkdir(exist_ok=True)
    for path in authority.write_server(folder / "new"):
        path.replace(folder / path.name)
    return TlsFiles(folder / "server.pem", folder / "server.key")


async def shown(port: int) -> bytes:
    """Return the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(BOUND_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(found)


def der(file: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(file.read_text())


async def test_a_new_pair_is_served_and_half_of_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    files = put(tmp_path, authority)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = server_of(Settings(), Listening(tls=files))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(BOUND_S):
            while not server.started:
                await asyncio.sleep(0)
        first = der(files.certificate)
        assert await shown(port) == first
        watch = CertificateWatch(files, server.config.ssl)
        old_key = files.key.read_bytes()
        with caplog.at_level(logging.INFO, "icehouse.http"):
            await watch.look()
            new_key = put(tmp_path, authority).key.read_bytes()
            files.key.write_bytes(old_key)
            for _ in range(2):
                await watch.look()
            assert await shown(port) == first != der(files.certificate)
            files.key.write_bytes(new_key)
            await watch.look()
            assert await shown(port) == der(files.certificate)
        events = [record.getMessage() for record in caplog.records]
        assert events == ["http_certificate_kept", "http_certificate_taken"]
    finally:
        server.should_exit = True
        await serving
