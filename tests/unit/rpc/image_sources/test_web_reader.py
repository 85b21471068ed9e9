"""GET requests to a host of loopback that answers as it likes: what is asked, read, followed and refused."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from icehouse_server.config import ServerConfig
from icehouse_server.errors import InvalidRequest, Reason, SourceUnreachable
from icehouse_server.rpc.image_sources.image_address import IpAddress, SourceRules, WebAddress
from icehouse_server.rpc.image_sources.image_fetcher import Resolve, WebReader, addresses_of

from tests.fixtures.rpc.authority import Authority
from tests.fixtures.web_host import WebHost, answer, web_host

FIELD = "prompt.chat.messages[0].parts[0].image.uri"
LIMIT = 1000
BODY = b"picture"
NAMES: dict[str, Sequence[str]] = {
    "pictures.example": ["127.0.0.1"],
    "inside.example": ["10.255.255.1", "169.254.169.254", "::1"],
}


async def resolve(host: str) -> Sequence[IpAddress]:
    if host not in NAMES:
        raise OSError("no such name")
    return [ipaddress.ip_address(each) for each in NAMES[host]]


@pytest.fixture
async def host() -> AsyncIterator[WebHost]:
    async with web_host() as made:
        yield made


def rules_of(host: WebHost, *more: str) -> SourceRules:
    return SourceRules.of(ServerConfig(image_hosts=",".join((f"127.0.0.1:{host.port}", *more))))


async def fetch(
    host: WebHost,
    path: str = "/",
    *more: str,
    name: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    resolve: Resolve = resolve,
) -> bytes:
    rules = rules_of(host, *more)
    scheme = "https" if tls is not None else "http"
    address = rules.address_of(f"{scheme}://{name}:{host.port}{path}", field=FIELD)
    assert isinstance(address, WebAddress)
    return await WebReader(rules, resolve=resolve, tls=tls).read(address, limit_bytes=LIMIT, field=FIELD)


async def refusal(host: WebHost, path: str = "/", *more: str, name: str = "127.0.0.1") -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetch(host, path, *more, name=name)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, FIELD)
    return caught.value.message


async def absence(host: WebHost, path: str = "/", *more: str, name: str = "127.0.0.1") -> str:
    with pytest.raises(SourceUnreachable) as caught:
        await fetch(host, path, *more, name=name)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_UNREACHABLE, FIELD)
    return caught.value.message


async def test_a_request_says_what_it_must_and_no_more(host: WebHost) -> None:
    host.answers["/a%20b?c=d&e"] = answer(200, BODY)
    assert await fetch(host, "/a%20b?c=d&e#f") == BODY
    [request] = host.requests
    lines = request.decode().split("\r\n")
    assert lines[:2] == ["GET /a%20b?c=d&e HTTP/1.1", f"Host: 127.0.0.1:{host.port}"]
    assert {"Accept-Encoding: identity", "Connection: close"} <= set(lines)
    assert not {"cookie", "authorization", "referer"} & {line.partition(":")[0].lower() for line in lines}


@pytest.mark.parametrize(
    "data",
    [
        answer(200, BODY),
        answer(200, BODY, length=None),
        answer(200, b"3;x=y\r\npic\r\n4\r\nture\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=None),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(200, BODY),
        b"HTTP/1.0 200\r\nContent-Length:7\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n" + BODY + b"more",
        answer(200, BODY, "Content-Encoding: identity"),
        answer(200, BODY + b"more", "Content-Type: IMAGE/png; q=1", length=len(BODY)),
        answer(200, BODY, "Content-Type: application/octet-stream"),
    ],
    ids=["length", "to the end", "chunks", "a go-ahead first", "an old one", "identity", "more", "octets"],
)
async def test_every_way_to_send_a_body(host: WebHost, data: bytes) -> None:
    host.answers["/"] = data
    assert await fetch(host) == BODY


@pytest.mark.parametrize(
    "data",
    [
        answer(200, b"", length=LIMIT + 1),
        answer(200, b"", length=10**17),
        answer(200, b"x" * (LIMIT + 1), length=None),
        answer(200, b"ffffffff\r\n" + b"x" * (LIMIT + 1), "Transfer-Encoding: chunked", length=None),
        answer(200, b"5\r\nxxxxx\r\n" * (LIMIT + 1), "Transfer-Encoding: chunked", length=None),
    ],
    ids=["said", "absurd", "sent", "a chunk", "many chunks"],
)
async def test_nothing_is_read_beyond_the_limit(host: WebHost, data: bytes) -> None:
    host.answers["/"] = data
    assert f"more than {LIMIT} bytes" in await refusal(host)
    # Nor is the connection kept, whatever the host has left to say.
    await host.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
        answer(200, BODY, "Transfer-Encoding: gzip, chunked", length=None),
        answer(200, b"-7\r\npicture\r\n", "Transfer-Encoding: chunked", length=None),
        answer(200, b"xyz\r\npic\r\n", "Transfer-Encoding: chunked", length=None),
        answer(200, BODY, "Content-Length: 8"),
    ],
)
async def test_what_is_no_http_is_not_read(host: WebHost, data: bytes) -> None:
    host.answers["/"] = data
    message = await absence(host)
    assert "SSH" not in message and "xyz" not in message


@pytest.mark.parametrize("header", ["Content-Encoding: gzip", "Content-Type: text/html"])
async def test_what_is_no_image_is_refused(host: WebHost, header: str) -> None:
    host.answers["/"] = answer(200, BODY, header)
    await refusal(host)


@pytest.mark.parametrize("status", [204, 206, 304, 401, 403, 404])
async def test_what_the_host_does_not_have_is_refused(host: WebHost, status: int) -> None:
    host.answers["/"] = answer(status, b"no picture, but a secret")
    message = await refusal(host)
    assert f"answers {status}" in message and "secret" not in message


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_what_the_host_cannot_give_now_may_be_asked_for_later(host: WebHost, status: int) -> None:
    host.answers["/"] = answer(status, b"")
    assert f"answers {status}" in await absence(host)


async def test_a_connection_that_breaks_off_is_not_the_requests_fault(host: WebHost) -> None:
    chunked = "Transfer-Encoding: chunked"
    for data in (
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        answer(200, BODY, length=8),
        answer(200, b"", length=None),
        answer(200, b"8\r\npicture", chunked, length=None),
    ):
        host.answers["/"] = data
        assert "closed the connection" in await absence(host)
    await host.stop()
    assert "cannot be reached" in await absence(host)


CHUNKED = answer(200, b"", "Transfer-Encoding: chunked", length=None)


@pytest.mark.parametrize(
    ("begun", "endless"),
    [(answer(200, b"", length=None), b"x" * 4096), (CHUNKED, b"1\r\nx\r\n" * 999)],
    ids=["a body", "chunks"],
)
async def test_a_body_without_end_is_read_to_the_limit(host: WebHost, begun: bytes, endless: bytes) -> None:
    host.answers["/"], host.endless["/"], host.pause_s = begun, endless, 0.0
    assert f"more than {LIMIT} bytes" in await refusal(host)
    await host.closed()


async def test_lines_after_the_chunks_are_read_only_so_far(host: WebHost) -> None:
    host.answers["/"], host.endless["/"], host.pause_s = CHUNKED + b"0\r\n", b"x: y\r\n" * 999, 0.0
    await absence(host)
    await host.closed()


async def test_a_redirect_is_followed_within_the_rules(host: WebHost) -> None:
    host.answers["/a/b"] = answer(302, b"", "Location: ../c?d")
    host.answers["/c?d"] = answer(301, b"", f"Location: http://pictures.example:{host.port}/e")
    host.answers["/e"] = answer(200, BODY)
    more = f"pictures.example:{host.port}"
    assert await fetch(host, "/a/b", more) == BODY
    assert b"Host: pictures.example:" in host.requests[2]
    assert "may not fetch images" in await refusal(host, "/a/b")
    assert len(host.requests) == 5, "the host that is not allowed was not asked"


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:1/",
        "http://169.254.169.254/latest/meta-data",
        "//evil.example/x",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "gopher://127.0.0.1/",
        "http://user:word@127.0.0.1/",
        "http://[::1",
    ],
)
async def test_a_redirect_elsewhere_is_refused(host: WebHost, place: str) -> None:
    host.answers["/"] = answer(307, b"", f"Location: {place}")
    await refusal(host)
    assert len(host.requests) == 1


async def test_redirects_have_an_end(host: WebHost) -> None:
    host.answers["/"] = answer(302, b"", "Location: /")
    assert "redirected more than 3" in await refusal(host)
    assert len(host.requests) == 4


async def test_a_name_is_no_way_into_this_network(host: WebHost) -> None:
    """Neither of an allowed host's own choice nor by a redirect to another one that is allowed."""
    more = f"inside.example:{host.port}"
    assert "no public or allowed address" in await refusal(host, "/", more, name="inside.example")
    host.answers["/"] = answer(302, b"", f"Location: http://inside.example:{host.port}/")
    assert "no public or allowed address" in await refusal(host, "/", more)
    assert len(host.requests) == 1


async def by_system(host: str) -> Sequence[IpAddress]:
    return addresses_of(host)


async def test_the_name_of_this_machine_is_no_way_into_it_either(host: WebHost) -> None:
    rules = SourceRules.of(ServerConfig(image_hosts=f"localhost:{host.port}"))
    address = rules.address_of(f"http://localhost:{host.port}/", field=FIELD)
    assert isinstance(address, WebAddress)
    with pytest.raises(InvalidRequest, match="no public or allowed address"):
        await WebReader(rules, resolve=by_system).read(address, limit_bytes=LIMIT, field=FIELD)
    assert not host.requests


async def test_a_name_is_resolved_once_and_its_connection_made_to_what_was_checked(host: WebHost) -> None:
    """A second answer of the resolver leads nowhere."""
    asked: list[str] = []

    async def once(name: str) -> Sequence[IpAddress]:
        asked.append(name)
        return [ipaddress.ip_address("127.0.0.1" if len(asked) == 1 else "127.0.0.2")]

    host.answers["/"] = answer(200, BODY)
    assert await fetch(host, "/", f"a.example:{host.port}", name="a.example", resolve=once) == BODY
    assert asked == ["a.example"] and f"Host: a.example:{host.port}".encode() in host.requests[0]


async def test_a_name_that_is_unknown_may_be_known_later(host: WebHost) -> None:
    assert "no address" in await absence(host, "/", f"gone.example:{host.port}", name="gone.example")


async def test_the_first_address_that_answers_is_taken(
    host: WebHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.answers["/"] = answer(200, BODY)
    # The second one of loopback has no listener; the others are not allowed.
    monkeypatch.setitem(NAMES, "pictures.example", ["10.0.0.1", "127.0.0.2", "127.0.0.1"])
    names = f"pictures.example:{host.port},127.0.0.2:{host.port}"
    assert await fetch(host, "/", names, name="pictures.example") == BODY


async def test_the_system_knows_this_machine() -> None:
    assert ipaddress.ip_address("127.0.0.1") in addresses_of("127.0.0.1")
    for name in ("x" * 64 + ".example", ".."):
        with pytest.raises(OSError):
            addresses_of(name)


async def test_tls_proves_the_name_and_is_not_left_again(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.write_server(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    async with web_host(tls=served) as host:
        host.answers["/"] = answer(200, BODY)
        host.answers["/down"] = answer(302, b"", f"Location: http://127.0.0.1:{host.port}/")
        assert await fetch(host, "/", tls=trusting) == BODY
        with pytest.raises(InvalidRequest, match="from https to http"):
            await fetch(host, "/down", tls=trusting)
        with pytest.raises(SourceUnreachable, match="TLS"):
            await fetch(host, "/", tls=ssl.create_default_context())
        names = f"pictures.example:{host.port}"
        with pytest.raises(SourceUnreachable, match="TLS"):
            await fetch(host, "/", names, name="pictures.example", tls=trusting)
        assert len(host.requests) == 2
        asking = asyncio.ensure_future(fetch(host, "/slow", tls=trusting))
        await host.asked(3)
        asking.cancel()
        await asyncio.wait((asking,))
        await host.closed()
