"""What ends an output: end tokens that are waited for, ignored or forced, and words that never come."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.domain.events import Finished, FinishReason
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.vocabulary import EOS_ID
from tests.unit.engine.runner.test_runner import Running, start

PROMPT = (3, 34, 65, 96)
AT_ONCE = SamplingParams(logit_bias=((EOS_ID, 100.0),))
"""Draws the end token wherever it may."""


@pytest.fixture(scope="module", params=[True, False], ids=["pipelined", "not pipelined"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")
    started = start(folder, is_pipelined=request.param)
    yield started
    started.stop()


def ask(running: Running, name: str, sampling: SamplingParams, **changes) -> tuple[list[int], Finished]:
    wanted = GenerationRequest(
        request_id=RequestId(name),
        prompt_token_ids=PROMPT,
        max_output_tokens=9,
        sampling=sampling,
        stop=(),
        arrival_time=0.0,
    )
    tokens = running.ask([dataclasses.replace(wanted, **changes)])[name]
    end = running.recorder.wait_for_end(name)
    assert isinstance(end, Finished)
    return tokens, end


def test_an_end_token_ends_the_output(running: Running) -> None:
    tokens, end = ask(running, "ends", AT_ONCE)
    assert (tokens, end.reason) == ([EOS_ID], FinishReason.STOP_TOKEN)


def test_an_end_token_waits_for_the_fewest_tokens_wanted(running: Running) -> None:
    plain, _ = ask(running, "plain", SamplingParams())
    tokens, end = ask(running, "waits", dataclasses.replace(AT_ONCE, min_output_token_count=4))
    assert (tokens, end.reason) == ([*plain[:4], EOS_ID], FinishReason.STOP_TOKEN)


def test_an_ignored_end_token_is_a_token_like_any_other(running: Running) -> None:
    tokens, end = ask(running, "ignores", dataclasses.replace(AT_ONCE, ignores_end_tokens=True))
    assert (tokens, end.reason) == ([EOS_ID] * 9, FinishReason.LENGTH)


def test_a_stop_token_ends_the_output_and_waits_as_an_end_token_does(running: Running) -> None:
    plain, _ = ask(running, "open", SamplingParams())
    stop = plain[2]
    assert stop not in plain[:2] and EOS_ID not in plain
    tokens, end = ask(running, "stop token", SamplingParams(stop_token_ids=(stop,), ignores_end_tokens=True))
    assert (tokens, end.reason, end.stop_token_id) == (plain[:3], FinishReason.STOP_TOKEN, stop)
    tokens, _ = ask(running, "later", SamplingParams(stop_token_ids=(stop,), min_output_token_count=5))
    assert stop not in tokens[:5] and len(tokens) >= 5


def test_a_stop_string_waits_for_the_fewest_tokens_wanted(running: Running) -> None:
    plain, _ = ask(running, "unstopped", SamplingParams())
    text = running.recorder.text_of("unstopped")
    _, early = ask(running, "early", SamplingParams(), stop=(text[0],))
    assert (early.reason, early.stop_string) == (FinishReason.STOP_STRING, text[0])
    late = SamplingParams(min_output_token_count=len(plain))
    tokens, end = ask(running, "late", late, stop=(text[0],))
    assert (tokens, end.reason) == (plain, FinishReason.LENGTH)


def test_banned_sequences_never_come_and_the_rest_may(running: Running) -> None:
    plain, _ = ask(running, "free", SamplingParams())
    pair = (plain[1], plain[2])
    kept, _ = ask(running, "pair", SamplingParams(banned=(pair,)))
    assert kept[:2] == plain[:2] and pair not in itertools.pairwise(kept)
    begun = (PROMPT[-1], plain[0])
    other, _ = ask(running, "begun", SamplingParams(banned=(begun,)))
    assert other[0] != plain[0], "the prompt began the sequence and the output would have completed it"
