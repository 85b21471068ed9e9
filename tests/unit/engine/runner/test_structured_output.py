"""Outputs of random models inside a form: finished ones validate, cut ones say so, and nobody else notices.

A model of random weights is the best adversary: it wants any token at any place.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from icehouse_server.domain.events import Failed, Finished, FinishReason
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
)
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.engine.runner import model_loader
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.structured_output.compiler import GrammarCompiler

from tests.fixtures.models import VOCABULARY_SIZE, tiny_model_dir
from tests.fixtures.models.schemas import schemas
from tests.fixtures.models.vocabulary import EOS_ID, tokenizer
from tests.system.cache.server import CacheServer
from tests.unit.engine.runner.test_mixed_rows import ids, run, runner_of

BUILT = tokenizer()
QUOTE = BUILT.encode('"', add_special_tokens=False).ids[0]
PROMPT = BUILT.encode("The answer in the form that was asked for:", add_special_tokens=False).ids
COUNTER = itertools.count()


@dataclasses.dataclass(frozen=True)
class Bench:
    """A running engine on a tiny model, and the compiler for its vocabulary."""

    served: CacheServer
    compiler: GrammarCompiler

    def submit(self, form: ResponseFormat | None, **fields: Any) -> str:
        name = f"r{next(COUNTER)}"
        request = GenerationRequest(
            request_id=RequestId(name),
            prompt_token_ids=tuple(PROMPT),
            max_output_tokens=200,
            sampling=SamplingParams(temperature=1.0, seed=1),
            stop=(),
            arrival_time=0.0,
            grammar=None if form is None else self.compiler.compile(form),
        )
        self.served.engine.submit(dataclasses.replace(request, **fields))
        return name

    def end(self, name: str) -> tuple[str, Finished]:
        end = self.served.recorder.wait_for_end(name)
        assert isinstance(end, Finished), end
        return self.served.recorder.text_of(name), end

    def tokens(self, name: str) -> list[int]:
        self.end(name)
        return self.served.recorder.tokens_of(name)

    def fits(self, form: ResponseFormat, tokens: list[int]) -> bool:
        """Whether tokens are a beginning of the form."""
        constraint = self.compiler.compile(form).start()
        for token_id in tokens:
            constraint.accept(token_id)
        return constraint.error is None


@pytest.fixture(scope="module", params=[True, False], ids=["pipelined", "not pipelined"])
def bench(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
    with CacheServer(folder, None, is_pipelined=request.param) as served:
        yield Bench(served, compiler_of(folder))


def compiler_of(folder: Path) -> GrammarCompiler:
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    return GrammarCompiler(
        model_loader.load_tokenizer(source), vocabulary_size=VOCABULARY_SIZE, cache_limit=64
    )


def validate(text: str, schema: Any) -> None:
    """Raise unless the text is one JSON value of the schema; no name may come twice in an object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs), f"a name comes twice in {text}"
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=unique)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    validator.validate(value)


def check_outputs(bench: Bench, schema: dict[str, Any], seed: int, is_compact: bool) -> None:
    form = JsonSchema(json.dumps(schema, ensure_ascii=False), is_compact=is_compact)
    try:
        bench.compiler.compile(form)
    except InvalidRequest as error:
        # The one combination here that cannot be enforced.
        assert "min/maxProperties" in error.message
        return
    samplings = [SamplingParams(), *(SamplingParams(temperature=t, seed=seed) for t in (0.7, 1.0, 2.0))]
    names = [bench.submit(form, sampling=sampling) for sampling in samplings]
    names.append(bench.submit(form, sampling=samplings[2], max_output_tokens=3))
    for name in names:
        text, end = bench.end(name)
        if end.reason is FinishReason.STOP_TOKEN:
            validate(text, schema)
        else:
            assert end.reason is FinishReason.LENGTH
            assert bench.fits(form, bench.tokens(name))


arguments = {"schema": schemas(), "seed": st.integers(0, 2**32), "is_compact": st.booleans()}
shared_engine = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=10, **shared_engine)
@given(**arguments)
def test_a_finished_output_validates_and_a_cut_one_says_so(
    bench: Bench, schema: dict[str, Any], seed: int, is_compact: bool
) -> None:
    check_outputs(bench, schema, seed, is_compact)


@pytest.mark.slow
@settings(max_examples=1000, **shared_engine)
@given(**arguments)
def test_many_finished_outputs_validate(
    bench: Bench, schema: dict[str, Any], seed: int, is_compact: bool
) -> None:
    check_outputs(bench, schema, seed, is_compact)


FORMS: list[tuple[ResponseFormat, str]] = [
    (Regex("[a-d]{3}(-[a-d]{2}){2}"), "[a-d]{3}(-[a-d]{2}){2}"),
    (LarkGrammar('start: "(" start ")" | "🧊"'), r"\(*🧊\)*"),
    (Choice(("yes", "yes, but no", "🧊🧊")), "yes|yes, but no|🧊🧊"),
    (JsonObject(is_compact=True), r"\{.*\}"),
]


def test_every_form_beside_plain_rows_and_each_as_it_is_alone(bench: Bench) -> None:
    quotes = SamplingParams(temperature=1.0, seed=9, logit_bias=((QUOTE, 6.0),))
    asked: list[tuple[ResponseFormat | None, SamplingParams]] = [
        (form, sampling) for form, _ in FORMS for sampling in (SamplingParams(), quotes)
    ]
    asked += [(None, SamplingParams()), (None, quotes)]
    alone = [bench.tokens(bench.submit(form, sampling=s, max_output_tokens=60)) for form, s in asked]
    names = [bench.submit(form, sampling=s, max_output_tokens=60) for form, s in asked]
    assert [bench.tokens(name) for name in names] == alone
    finished = 0
    for (_, pattern), name in zip([f for f in FORMS for _ in range(2)], names, strict=False):
        text, end = bench.end(name)
        if end.reason is FinishReason.STOP_TOKEN:
            finished += 1
            assert re.fullmatch(pattern, text, re.DOTALL), text
    assert finished >= 6, "most of them finish"
    assert [bench.end(name)[1].reason for name in names[-2:]] == [FinishReason.LENGTH] * 2


def test_a_form_wins_over_bias_bans_and_least_lengths(bench: Bench) -> None:
    form = Choice(("yes", "no"))
    first = {text: BUILT.encode(text, add_special_tokens=False).ids[0] for text in ("yes", "no", "x")}
    biased = SamplingParams(logit_bias=((first["x"], 100.0), (first["yes"], -100.0)))
    assert bench.end(bench.submit(form, sampling=biased))[0] == "no"
    banned = SamplingParams(banned=((first["yes"],), (first["no"],)), min_output_token_count=50)
    text, end = bench.end(bench.submit(form, sampling=banned))
    assert text in ("yes", "no") and end.reason is FinishReason.STOP_TOKEN


def test_a_stop_string_ends_a_form_early_and_is_named(bench: Bench) -> None:
    text, end = bench.end(bench.submit(Choice(("abcd",)), stop=("cd", "bc")))
    assert (text, end.reason, end.stop_string) == ("a", FinishReason.STOP_STRING, "bc")


def test_an_end_token_drawn_in_a_complete_form_is_no_text(bench: Bench) -> None:
    wants_end = SamplingParams(logit_bias=((EOS_ID, 100.0),))
    name = bench.submit(Regex("ab+"), sampling=wants_end)
    text, end = bench.end(name)
    assert (text, end.reason) == ("ab", FinishReason.STOP_TOKEN)
    assert bench.tokens(name)[-1] == EOS_ID


def test_a_form_that_grows_too_complex_ends_its_own_request_only(bench: Bench) -> None:
    heavy = bench.submit(LarkGrammar('start: (("a"{1000}){1000}){1000}'))
    light = bench.submit(Choice(("yes",)))
    end = bench.served.recorder.wait_for_end(heavy)
    assert isinstance(end, Failed) and end.error.reason is Reason.GRAMMAR_TOO_COMPLEX
    assert bench.end(light)[0] == "yes"


def test_what_the_cache_has_changes_nothing(bench: Bench) -> None:
    form = JsonObject(is_compact=True)
    sampling = SamplingParams(temperature=1.0, seed=3, logit_bias=((QUOTE, 6.0),))
    uses = (CacheUse.OFF, CacheUse.READ_WRITE, CacheUse.READ_WRITE, CacheUse.OFF)
    names = [bench.submit(form, sampling=sampling, cache_use=use) for use in uses]
    tokens = [bench.tokens(name) for name in names]
    assert tokens == [tokens[0]] * 4
    assert bench.end(names[2])[1].usage.cache.cached_token_count > 0


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_parked_row_goes_on_inside_its_form(tmp_path: Path, is_pipelined: bool) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    runner = runner_of(folder, is_pipelined=is_pipelined)
    grammar = compiler_of(folder).compile(Regex("([a-z]{2} [A-Z]{2} ){4}[a-z ]{100}"))

    def row(output: tuple[int, ...] = ()) -> DecodeRow:
        sampling = SamplingParams(temperature=1.0, seed=5)
        return DecodeRow(sampling, tuple(PROMPT), output, constraint=grammar.start())

    whole = ids(run(runner, {0: row()}))[0]
    for cut in (1, 4, 9):
        assert ids(run(runner, {0: row(tuple(whole[:cut]))}))[0] == whole[cut:]
