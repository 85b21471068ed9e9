"""What URIs name, and that nothing is named which settings do not allow, in whatever spelling."""

from __future__ import annotations

import ipaddress

import pytest
from icehouse_server.config import ServerConfig
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.image_sources.image_address import FileAddress, SourceRules, WebAddress, is_public

FIELD = "prompt.chat.messages[0].parts[0].image.uri"
RULES = SourceRules.of(
    ServerConfig(
        image_folders="/srv/pictures,/srv/pictures/small,/data",
        image_hosts="pictures.example,10.1.2.3:8080,[2001:db8::7],1.2.3.4",
    )
)


def refusal(uri: str, rules: SourceRules = RULES) -> str:
    with pytest.raises(InvalidRequest) as caught:
        rules.address_of(uri, field=FIELD)
    error = caught.value
    assert (error.reason, error.field) == (Reason.IMAGE_INVALID, FIELD) and FIELD in error.message
    assert len(error.message) < 300
    return error.message


@pytest.mark.parametrize(
    ("uri", "folder", "names"),
    [
        ("file:///srv/pictures/cat.png", "/srv/pictures", ("cat.png",)),
        ("FILE://localhost/srv/pictures//a/./b%20c.png", "/srv/pictures", ("a", "b c.png")),
        ("file:/srv/pictures/small/cat.png", "/srv/pictures/small", ("cat.png",)),
        ("file:///data/%C3%A4%23.png", "/data", ("ä#.png",)),
        ("file:///data/a%2Fb", "/data", ("a", "b")),
    ],
)
def test_a_file_below_an_allowed_folder(uri: str, folder: str, names: tuple[str, ...]) -> None:
    assert RULES.address_of(uri, field=FIELD) == FileAddress(folder, names)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "file:///srv/pictures/../../etc/passwd",
        "file:///srv/pictures/%2e%2e/secret",
        "file:///srv/pictures/a%2f..%2f..%2fsecret",
        "file:///srv/pictures/small/../cat.png",
        "file:///srv/picturesque/cat.png",
        "file:///srv/pictures",
        "file:///srv/pictures/",
        "file:///",
        "file:srv/pictures/cat.png",
        "file:///srv/pictures/cat.png%00.txt",
        "file:////etc/passwd",
    ],
)
def test_a_file_elsewhere_is_refused_in_the_same_words_whatever_it_is(uri: str) -> None:
    assert refusal(uri) == refusal("file:///nowhere/at/all")


@pytest.mark.parametrize(
    "uri",
    [
        "file://server/srv/pictures/cat.png",
        "file:///srv/pictures/cat.png?x=1",
        "file:///srv/pictures/cat.png#x",
        "file:///srv/pictures/a b.png",
        "file:///srv/pictures/\u00e4.png",
        "file:///srv/pictures\\..\\x",
        "file:///srv/pictures/" + "a" * 9000,
    ],
)
def test_what_is_no_file_url_is_refused(uri: str) -> None:
    refusal(uri)


@pytest.mark.parametrize(
    ("uri", "host", "port", "target", "authority"),
    [
        ("https://Pictures.Example/a?b=c&d", "pictures.example", 443, "/a?b=c&d", "pictures.example"),
        ("http://pictures.example:80", "pictures.example", 80, "/", "pictures.example"),
        ("http://10.1.2.3:8080/x", "10.1.2.3", 8080, "/x", "10.1.2.3:8080"),
        ("https://[2001:DB8:0::7]/x#y", "2001:db8::7", 443, "/x", "[2001:db8::7]"),
    ],
)
def test_a_resource_of_an_allowed_host(uri: str, host: str, port: int, target: str, authority: str) -> None:
    found = RULES.address_of(uri, field=FIELD)
    assert isinstance(found, WebAddress)
    assert (found.host, found.port, found.target, found.authority) == (host, port, target, authority)
    assert found.is_secure is uri.startswith("https")


@pytest.mark.parametrize(
    "uri",
    [
        "https://example.org/a.png",
        "https://pictures.example.evil.org/a",
        "https://evil.org#pictures.example/a",
        "https://evil.org?@pictures.example/a",
        "https://pictures.example./a",
        "https://pictures.example:8443/a",
        "http://10.1.2.3/x",
        "http://10.1.2.3:80/x",
        "http://0x0a010203:8080/x",
        "http://167838211:8080/x",
        "http://[::ffff:1.2.3.4]/x",
        "http://127.0.0.1/",
        "http:///x",
        "http:pictures.example/x",
    ],
)
def test_another_host_is_refused(uri: str) -> None:
    message = refusal(uri)
    assert "may not fetch images" in message, message


@pytest.mark.parametrize(
    "uri",
    [
        "https://user:secret@pictures.example/a",
        "https://pictures.example:99999/a",
        "https://pictures.example:x/a",
        "https://[::1/a",
        "https://pictures.example/a\r\nX-Evil: 1",
        "https://pictures.example/a b",
        "https://pictures.example\t/a",
        "https://pictures.example\\@evil.org/a",
        "https://p\u00efctures.example/a",
    ],
)
def test_what_is_no_url_or_more_than_that_is_refused(uri: str) -> None:
    assert "secret" not in refusal(uri)


def test_without_a_setting_nothing_is_read_and_other_schemes_never_are() -> None:
    for uri in (
        "file:///srv/pictures/cat.png",
        "https://pictures.example/a",
        "ftp://x/y",
        "x",
        "javascript:1",
    ):
        message = refusal(uri, SourceRules())
        assert "data:image/png;base64" in message and "allowed" not in message
    assert "allowed folder" in refusal("ftp://pictures.example/a") and "allowed host" in refusal("gopher:x")


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1", "64:ff9b:1::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::", "::127.0.0.1"),
        *("2001::1", "100::1", "4000::1"),
    ],
)
def test_addresses_of_this_machine_and_its_networks_are_not_public(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert not RULES.reaches(address, 443, host="pictures.example", is_secure=True)


REGISTERED = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
    *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4"),
    *("::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32", "2002::/16"),
    *("2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)
"""IANA's registries of special-purpose addresses (November 2025) with multicast and what was given up."""


@pytest.mark.parametrize("text", REGISTERED)
def test_no_registered_special_purpose_is_public(text: str) -> None:
    network = ipaddress.ip_network(text)
    for address in (network[0], network[1], network[network.num_addresses // 2], network[-1]):
        assert not is_public(address), address
        if isinstance(address, ipaddress.IPv4Address):
            number = int(address)
            for inside in ("::ffff:0:0", "64:ff9b::"):
                assert not is_public(ipaddress.IPv6Address(int(ipaddress.IPv6Address(inside)) | number))


def test_what_lies_beside_a_special_purpose_is_public() -> None:
    for text in ("192.88.98.1", "192.88.100.1", "3ffe::1", "2001:200::1", "192.0.1.1", "2620:4f:7fff::1"):
        assert is_public(ipaddress.ip_address(text)), text


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_addresses_of_the_internet_are(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    assert RULES.reaches(ipaddress.ip_address(text), 443, host="pictures.example", is_secure=True)


def test_a_name_leads_to_a_private_address_only_where_that_is_allowed_by_itself() -> None:
    private = ipaddress.ip_address("10.1.2.3")
    assert RULES.reaches(private, 8080, host="pictures.example", is_secure=False)
    assert not RULES.reaches(private, 80, host="pictures.example", is_secure=False)
    assert RULES.reaches(private, 8080, host="10.1.2.3", is_secure=False)
