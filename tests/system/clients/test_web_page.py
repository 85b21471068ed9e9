"""What the page for a browser is told of its packages, and what keeps it from being tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.clients import web_page


def test_every_module_that_a_package_exports_has_its_address(tmp_path: Path) -> None:
    exports = {
        ".": {"import": "./esm/index.js", "require": "./cjs/index.js"},
        "./wire": {"types": "./esm/wire.d.ts", "default": "./esm/wire.js"},
        "./v1/*": {"default": "./esm/*.js"},
        "./package.json": "./package.json",
    }
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "package.json").write_text(json.dumps({"exports": exports}))
    assert web_page.import_map(tmp_path, {"@one/two": "there"}) == {
        "@one/two": "/there/esm/index.js",
        "@one/two/wire": "/there/esm/wire.js",
    }


def test_without_a_browser_or_envoy_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "browser_path", lambda: None)
    assert "chromium" in (web_page.obstacle_of("http://127.0.0.1:1") or "")
    monkeypatch.setattr(web_page, "browser_path", lambda: "/usr/bin/chromium")
    assert "Envoy" in (web_page.obstacle_of("") or "")
    assert web_page.obstacle_of("http://127.0.0.1:1") is None
