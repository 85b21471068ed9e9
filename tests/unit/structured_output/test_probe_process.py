"""A form is first compiled in a process that can be stopped; what passes there is compiled here as before."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from icehouse_server.domain.response_format import Choice, JsonSchema, LarkGrammar, Regex
from icehouse_server.errors import InvalidRequest
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.structured_output.probe_process import ProbeLimits, ProbeProcess, ProbeSetup, command

from tests.fixtures.models.vocabulary import VOCABULARY_SIZE
from tests.fixtures.patience import BOUND_S
from tests.unit.structured_output.test_compiler import Vocabulary, compiler

BOMB = JsonSchema(json.dumps({"type": "integer", "allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}))
"""Two divisors whose product is what they cost: 25 s and 615 MB."""
GOOD = JsonSchema('{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
LIMITS = ProbeLimits(cpu_s=1, stack_bytes=GrammarCompiler.stack_bytes(64 << 10))


@pytest.fixture
def probe() -> Iterator[ProbeProcess]:
    made = ProbeProcess(setup(), LIMITS)
    yield made
    made.close()


def setup() -> ProbeSetup:
    vocabulary = Vocabulary()
    text = vocabulary.vocabulary_json()
    assert text is not None
    return ProbeSetup(text, VOCABULARY_SIZE, vocabulary.eos_token_ids)


def test_good_forms_pass_one_after_the_other_in_one_process(probe: ProbeProcess) -> None:
    processes = set()
    for form in (GOOD, Regex("a+"), Choice(("a", "b")), LarkGrammar('start: "a"')):
        probe.check(form, field="response_format")
        assert probe._process is not None
        processes.add(probe._process.pid)
    assert len(processes) == 1


def test_a_costly_form_is_stopped_and_the_next_one_is_probed_again(probe: ProbeProcess) -> None:
    probe.check(GOOD, field="response_format")
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            probe.check(BOMB, field="response_format.json_schema")
        assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"
        assert caught.value.field == "response_format.json_schema"
        probe.check(GOOD, field="response_format")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
def test_a_form_that_takes_memory_is_stopped_by_that() -> None:
    limits = ProbeLimits(cpu_s=20, stack_bytes=LIMITS.stack_bytes, memory_bytes=48 << 20)
    probe = ProbeProcess(setup(), limits)
    probe.check(GOOD, field="response_format")
    with pytest.raises(InvalidRequest) as caught:
        probe.check(BOMB, field="response_format.json_schema")
    assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"
    probe.close()


@pytest.mark.parametrize(
    "form",
    [
        JsonSchema("{"),
        JsonSchema('{"type": "nothing"}'),
        JsonSchema('{"properties": {"a": {"multipleOf": 1000003}}}'),
        JsonSchema('{"minimum": ' + "9" * 5000 + "}"),
        JsonSchema('{"const": "\\ud800"}'),
        JsonSchema('{"enum": ["\\ud800"], "x-guidance": {}}'),
        Regex("("),
        LarkGrammar("start: nobody"),
        Choice(("",)),
    ],
    ids=lambda form: repr(form)[:40],
)
def test_a_mistake_is_reported_in_the_same_words_as_without_a_probe(probe: ProbeProcess, form: Any) -> None:
    found = []
    for by in (compiler(), compiler(make_probe=lambda _: probe)):
        with pytest.raises(InvalidRequest) as caught:
            by.compile(form)
        error = caught.value
        found.append((error.reason, error.message, error.field, error.metadata))
    assert found[0] == found[1]


def test_a_cached_form_is_not_probed_again(probe: ProbeProcess) -> None:
    by: GrammarCompiler = compiler(make_probe=lambda _: probe)
    assert by.kept(GOOD) is None
    first = by.compile(GOOD)
    probe.close()
    assert by.compile(GOOD) is first and by.kept(GOOD) is first


def test_closing_ends_the_process(probe: ProbeProcess) -> None:
    by: GrammarCompiler = compiler(make_probe=lambda _: probe)
    by.compile(GOOD)
    process = probe._process
    assert process is not None and process.poll() is None
    by.close()
    assert process.poll() is not None


def test_a_model_that_comes_back_has_its_forms_probed_in_another_process() -> None:
    made: list[ProbeProcess] = []

    def make_probe(setup: ProbeSetup) -> ProbeProcess:
        made.append(ProbeProcess(setup, LIMITS))
        return made[-1]

    by: GrammarCompiler = compiler(make_probe=make_probe)
    vocabulary = by.prepare()
    by.compile(GOOD)
    by.close()
    by.compile(Regex("a+"))
    assert by.prepare() is vocabulary, "it was read again"
    first, second = made
    assert first._process is None and second._process is not None
    by.close()
    assert second._process is None


def test_without_a_process_forms_are_accepted_without_a_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    ProbeProcess(setup(), LIMITS).check(GOOD, field="response_format")
    assert [record.message for record in caplog.records] == ["forms_compiled_untried"]


def test_the_process_ends_with_its_connection() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = subprocess.Popen(command(theirs.fileno()), pass_fds=[theirs.fileno()])
    theirs.close()
    ours.close()
    assert process.wait(BOUND_S) == 0
