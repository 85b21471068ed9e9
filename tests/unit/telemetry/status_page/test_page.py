"""The page over HTTP: who gets it, what it may load, and how often the server is asked."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from icehouse_server.domain.stats import ServerStatus
from icehouse_server.telemetry.prometheus import PrometheusMeter, serve_metrics
from icehouse_server.telemetry.status_page.page import ReportRules, StatusPage

from tests.fixtures.patience import BOUND_S
from tests.fixtures.telemetry.facts import SNAPSHOT
from tests.unit.rpc.conftest import FakeClock

STATUS = ServerStatus(collect_time=1000.0, snapshot=SNAPSHOT)


class Endpoint:
    """An endpoint whose server answers what the test says, and how often it was asked."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.status: ServerStatus | None = STATUS
        self.asked_count = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        rules = ReportRules(version="1", shows_request_ids=True, name_key=b"k")
        page = StatusPage(read=self._read, first_token=lambda: (), rules=rules, clock=self.clock)
        self._server = serve_metrics(
            PrometheusMeter(), lambda: SNAPSHOT, host="127.0.0.1", port=0, pages=page.pages
        )
        self.port = self._server.server_port

    def _read(self) -> ServerStatus | None:
        self.asked_count += 1
        assert self.may_answer.wait(BOUND_S)
        return self.status

    def get(
        self, path: str, *, host: str | None = None, method: str = "GET"
    ) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    started = Endpoint()
    yield started
    started.stop()


def test_the_page_may_run_its_own_script_and_style_and_ask_its_own_server_alone(endpoint: Endpoint) -> None:
    answer, page = endpoint.get("/")
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    rules = dict(
        part.strip().partition(" ")[::2] for part in answer.headers["Content-Security-Policy"].split(";")
    )
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["require-trusted-types-for"] == "'script'"
    for element in ("script", "style"):
        [content] = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{element}-src"] == f"'sha256-{digest}'"
    assert endpoint.asked_count == 0, "the page itself asks the server nothing"


def test_the_page_is_one_file_that_writes_text_only(endpoint: Endpoint) -> None:
    _, page = endpoint.get("/")
    addresses = set(re.findall(r"\w+://[^\s'\"<>)]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "that is a name of a language, and no request"
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", page) == []
    markup = page.partition("<script>")[0] + page.partition("</script>")[2]
    assert re.findall(r"\s(?:style|on\w+)=", markup) == []


def test_the_report_is_made_once_a_second_however_many_look(endpoint: Endpoint) -> None:
    endpoint.may_answer.clear()
    with ThreadPoolExecutor(8) as looking:
        answers = [looking.submit(endpoint.get, "/status.json") for _ in range(8)]
        endpoint.may_answer.set()
        texts = {answer.result()[1] for answer in answers}
    assert endpoint.asked_count == 1 and len(texts) == 1
    assert json.loads(texts.pop())["state"] == "ready"
    endpoint.clock.now += 0.9
    endpoint.get("/status.json")
    assert endpoint.asked_count == 1
    endpoint.clock.now += 0.1
    answer, _ = endpoint.get("/status.json")
    assert endpoint.asked_count == 2
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_a_server_that_does_not_answer_is_not_asked_again_at_once(endpoint: Endpoint) -> None:
    endpoint.status = None
    for _ in range(3):
        answer, _ = endpoint.get("/status.json")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert endpoint.asked_count == 1


def test_who_comes_when_many_wait_is_sent_away(endpoint: Endpoint) -> None:
    endpoint.may_answer.clear()
    with ThreadPoolExecutor(40) as looking:
        answers = [looking.submit(endpoint.get, "/status.json") for _ in range(40)]
        while sum(answer.done() for answer in answers) < 40 - 16:
            assert not any(answer.done() and answer.result()[0].status != 503 for answer in answers)
        endpoint.may_answer.set()
        codes = [answer.result()[0].status for answer in answers]
    assert (codes.count(200), codes.count(503)) == (16, 24)


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_who_names_the_endpoint_by_a_domain_of_theirs_sees_nothing(endpoint: Endpoint, path: str) -> None:
    assert endpoint.get(path, host="localhost:9464")[0].status == 200
    assert endpoint.get(path, host="rebound.example:9464")[0].status == 421


def test_it_is_read_only(endpoint: Endpoint) -> None:
    for path in ("/", "/status.json"):
        assert endpoint.get(path, method="POST")[0].status == 405
    assert endpoint.asked_count == 0


def test_every_other_path_answers_with_the_metrics(endpoint: Endpoint) -> None:
    for path in ("/metrics", "/anything"):
        _, text = endpoint.get(path)
        assert "icehouse_engine_requests" in text
