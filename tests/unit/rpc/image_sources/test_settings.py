"""Folders and hosts of images, as settings list them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from icehouse_server.config import ServerConfig
from icehouse_server.errors import ConfigError
from icehouse_server.rpc.image_sources.image_address import ImageHost, read_image_folders, read_image_hosts
from icehouse_server.rpc.image_sources.image_fetcher import ImageFetcher


def test_nothing_is_listed_where_nothing_is_set() -> None:
    for text in (None, "", " , "):
        assert read_image_hosts(text) == () and read_image_folders(text) == ()


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Images.Example.org", ImageHost("images.example.org")),
        ("10.0.0.7:8080", ImageHost("10.0.0.7", 8080)),
        ("2001:DB8::0:1", ImageHost("2001:db8::1")),
        ("[2001:db8::1]", ImageHost("2001:db8::1")),
        ("[::1]:9000", ImageHost("::1", 9000)),
    ],
)
def test_a_host_is_a_name_or_an_address_with_a_port_or_without(text: str, host: ImageHost) -> None:
    assert read_image_hosts(f"a.b, {text}") == (ImageHost("a.b"), host)


@pytest.mark.parametrize(
    "text", ["https://x", "x:0", "x:y", "x:65536", "a b", "*.example.org", "x/y", "u@x", "-", "[::1", ":80"]
)
def test_what_is_no_host_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="lists"):
        read_image_hosts(text)


def test_folders_are_whole_paths() -> None:
    assert read_image_folders("/srv/pictures/, ~/p") == ("/srv/pictures", os.path.expanduser("~/p"))
    for text in ("pictures", "/srv/../etc", "/", "/a//b", "/a/./b", "/a\0b"):
        with pytest.raises(ValueError, match="absolute path"):
            read_image_folders(text)


def test_a_list_has_an_end() -> None:
    with pytest.raises(ValueError, match="65"):
        read_image_hosts(",".join(f"h{i}" for i in range(65)))


@pytest.mark.parametrize(("name", "text"), [("image_hosts", "a b"), ("image_folders", "pictures")])
def test_a_mistake_is_found_when_the_server_starts(name: str, text: str) -> None:
    wrong: Any = {name: text}
    with pytest.raises(ConfigError) as caught:
        ImageFetcher(ServerConfig(**wrong))
    assert caught.value.field == f"server.{name}" and name in caught.value.message
