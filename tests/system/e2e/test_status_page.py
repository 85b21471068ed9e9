"""The status page of a whole server: what it tells, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import cache_policy_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_client.log_lines import JsonFormatter, fields_of
from icehouse_server.telemetry.status_page.page import CHARACTER_LIMIT

from tests.fixtures.browser import NAMES, Browser, browser_path, browsing
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.whole_server import WholeServer, whole_server

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
SHARED = "once upon a time there was a house of ice "
SETTINGS: dict[str, Any] = {
    "cache__block_token_count": 16,
    "cache__min_prefix_token_count": 0,
    "telemetry__metrics_port": 0,
    "telemetry__status_page_enabled": True,
}
WITH_TEXT = {**SETTINGS, "telemetry__status_page_text_enabled": True}
WRITTEN = "hush <img src=x onerror=\"document.title='owned'\">\u202e\r\n\x1b[31m " * 3
"""A beginning that would like to be markup, to turn what is around it, and to colour a terminal."""
SHOWN = ("hush <img src=x onerror=\"document.title='owned'\">� �[31m " * 3)[:CHARACTER_LIMIT] + "…"


async def work(served: WholeServer, beginning: str = SHARED) -> None:
    """Send prompts that begin alike, of a tenant with a hostile name."""
    for number in range(3):
        request = messages.GenerateRequest(
            prompt={"text": f"{beginning}{number} {number}"},
            max_output_tokens=2,
            request_id=f"r{number}",
            cache=cache_policy_pb2.CachePolicy(tenant=HOSTILE),
        )
        await served.inference.Generate(request)
    await served.served.rpc.observation.sample()


def url_in(caplog: pytest.LogCaptureFixture) -> str:
    [url] = [fields_of(r)["url"] for r in caplog.records if r.message == "status_page_opened"]
    return str(url)


def report_at(url: str) -> str:
    """Return the report as it is sent."""
    return str(urllib.request.urlopen(f"{url}status.json", timeout=BOUND_S).read().decode())


async def test_the_report_tells_what_was_shared_and_never_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "icehouse.boot")
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks", **SETTINGS) as served:
        await work(served)
        text = await asyncio.to_thread(report_at, url_in(caplog))
    assert "once upon" not in text
    report = json.loads(text)
    assert report["shows_text"] is False
    [tree] = report["prefixes"]
    assert tree["hit_count"] == 2 and tree["start_token_index"] == 0
    assert {each["reuse"]: each["count"] for each in report["first_token"]} == {"cold": 1, "ram": 2}
    assert {each["request_id"] for each in report["slowest_requests"]} == {"r0", "r1", "r2"}
    assert report["tenants"][0]["tenant"] == HOSTILE


async def test_text_that_is_allowed_is_told_on_one_line_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks", **WITH_TEXT) as served:
        await work(served, WRITTEN)
        text = await asyncio.to_thread(report_at, url_in(caplog))
        [tree] = json.loads(text)["prefixes"]
        assert tree["text"] == SHOWN
    log = "\n".join(map(JsonFormatter().format, caplog.records))
    assert "status_page_opened" in log and "hush" not in log


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser on the PATH: none of {', '.join(NAMES)}")
    with browsing(path, tmp_path / "profile") as started:
        yield started


@pytest.mark.slow
async def test_a_browser_shows_text_that_is_allowed_as_text(
    tmp_path: Path, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "icehouse.boot")
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks", **WITH_TEXT) as served:
        await work(served, WRITTEN)
        await asyncio.to_thread(look_at_text, browser, url_in(caplog))


def look_at_text(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait_for("document.querySelector('#prefixes bdi') !== null")
    assert browser.text("#prefixes bdi") == SHOWN
    assert "of all tenants" in browser.text("#prefixes")
    assert browser.evaluate("document.title") == "Icehouse"
    assert browser.evaluate("document.querySelectorAll('#main img, #main script').length") == 0
    assert browser.console == [] and set(browser.requested) == {url, f"{url}status.json"}


@pytest.mark.slow
async def test_a_browser_shows_it_all_as_text_and_asks_nobody_else(
    tmp_path: Path, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "icehouse.boot")
    async with whole_server(tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks", **SETTINGS) as served:
        await work(served)
        url = url_in(caplog)
        await asyncio.to_thread(look, browser, url)
    await asyncio.to_thread(browser.wait_for, "document.body.className === 'lost'")
    assert "no answer" in await asyncio.to_thread(browser.text, "#state")


def look(browser: Browser, url: str) -> None:
    browser.open(url)
    # Twice: the second report is drawn over the first.
    browser.wait_for("typeof samples !== 'undefined' && samples.length > 1")
    assert "ready" in browser.text("#state") and "tiny" in browser.text("#model")
    titles = browser.evaluate("[...document.querySelectorAll('h2')].map((title) => title.innerText)")
    assert titles == [
        *("Prompt tokens reused", "Output", "Running", "Waiting", "RAM", "SSD"),
        *("Time to first token", "Shared prefixes", "Slowest requests of the last ten minutes", "Tenants"),
    ]
    assert "2 of 3 hit" in browser.text("#main")
    assert browser.evaluate("document.querySelectorAll('#first-token svg').length") == 2
    assert browser.evaluate("document.querySelectorAll('#prefixes [role=treegrid] tbody tr').length") >= 1
    assert {"r0", "r1", "r2"} <= set(browser.text("#slowest").split())
    assert HOSTILE in browser.text("#tenants")
    assert browser.evaluate("document.title") == "Icehouse"
    assert browser.evaluate("document.querySelectorAll('#main img, #main script').length") == 0
    assert SHARED not in browser.evaluate("document.documentElement.outerHTML")
    assert browser.console == [] and set(browser.requested) == {url, f"{url}status.json"}
    in_light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != in_light
