"""Object store of the configured URL: what is refused at the start, and what is not."""

from __future__ import annotations

import sys

import pytest
from icehouse_server.bootstrap.cache_parts import open_shared_store, shared_settings
from icehouse_server.config import load_config
from icehouse_server.errors import ConfigError


def config(url: str, **flags):
    return load_config(flags={"cache.shared_url": url, **flags}, environ={}).config.cache


def test_a_url_that_names_no_store_is_refused() -> None:
    pytest.importorskip("obstore", reason="obstore comes with the extra shared")
    with pytest.raises(ConfigError, match="is not the URL of an object store") as caught:
        open_shared_store(config("ftp://host/path"))
    assert caught.value.field == "cache.shared_url"


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"\[shared\]"):
        open_shared_store(config("s3://bucket/path"))


def test_credentials_in_the_url_are_refused() -> None:
    for url in ("s3://key:secret@bucket/path", "az://account/container?sig=abc"):
        with pytest.raises(ConfigError, match="environment"):
            config(url)


def test_it_needs_the_ssd_tier() -> None:
    with pytest.raises(ConfigError, match="SSD tier"):
        config("s3://bucket/path", **{"cache.ssd_enabled": False})


def test_limits_come_from_the_settings() -> None:
    settings = shared_settings(config("s3://b/p", **{"cache.shared_lookup_timeout_ms": 100.0}))
    assert settings.lookup_timeout_s == 0.1
    assert settings.object_limit_bytes > config("s3://b/p").write_queue_bytes
