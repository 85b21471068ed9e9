"""Log probabilities against the model's own forward pass, with the cache and beside other requests."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.events import Delta, PrefillProgress, ReuseLimit
from icehouse_server.domain.request import LogprobsWanted, TokenLogprobs
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.models import build, tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

TOP = 3
ASKED = (200, 3, 77)
WANTED = LogprobsWanted(top_count=TOP, of_prompt=True, token_ids=ASKED)
SAMPLED = SamplingParams(temperature=1.5, seed=3, frequency_penalty=1.0)


def told(served: CacheServer, name: str) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Return what was told of the prompt and of the output, each delta's in step with its tokens."""
    of_prompt: list[TokenLogprobs] = []
    of_output: list[TokenLogprobs] = []
    for event in served.recorder.events[name]:
        if isinstance(event, PrefillProgress):
            of_prompt += event.logprobs
        if isinstance(event, Delta):
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
            of_output += event.logprobs
    return of_prompt, of_output


def expected(architecture: str, tokens: list[int]) -> np.ndarray:
    """Return the log probabilities behind every token, from one pass over all of them."""
    logits = build(architecture)(mx.array([tokens]))[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def check(entries: list[TokenLogprobs], tokens: list[int], table: np.ndarray) -> None:
    assert [entry.token_id for entry in entries] == tokens
    for entry, row in zip(entries, table, strict=True):
        falling = np.argsort(-row, kind="stable")
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-3)
        own = row[entry.token_id]
        assert 1 + (row > own + 1e-3).sum() <= entry.rank <= (row > own - 1e-3).sum()
        assert [top.token_id for top in entry.top] == falling[:TOP].tolist()
        assert [asked.token_id for asked in entry.asked] == [*ASKED]
        assert [asked.logprob for asked in entry.asked] == pytest.approx(row[[*ASKED]].tolist(), abs=2e-3)
        assert [top.logprob for top in entry.top] == pytest.approx(row[falling[:TOP]].tolist(), abs=2e-3)


@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
def test_they_are_the_models_own(tmp_path: Path, architecture: str, is_pipelined: bool) -> None:
    tokens = prompt(3 * BLOCK + 5)
    folder = tiny_model_dir(tmp_path, architecture)
    with CacheServer(folder, tmp_path / "cache", is_pipelined=is_pipelined, chunk=2 * BLOCK) as served:
        served.submit("beside", prompt(40, salt=4), max_output_tokens=30)
        answer = served.ask("asks", tokens, sampling=SAMPLED, logprobs=WANTED)
        served.answer("beside")
        of_prompt, of_output = told(served, "asks")
        beside = served.recorder.events["beside"]
        assert not any(event.logprobs for event in beside if isinstance(event, Delta | PrefillProgress))
    table = expected(architecture, [*tokens, *answer.tokens])
    check(of_prompt, tokens[1:], table[: len(tokens) - 1])
    check(of_output, answer.tokens, table[len(tokens) - 1 : -1])
    assert any(entry.rank > 1 for entry in of_output), "a hot and penalized draw"


def test_of_the_prompt_computes_it_all_and_leaves_it_for_others(tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 5)
    with CacheServer(tiny_model_dir(tmp_path, "llama"), tmp_path / "cache") as served:
        cold = served.ask("cold", tokens, logprobs=WANTED)
        again = served.ask("again", tokens, logprobs=WANTED)
        assert again.cache.limit is cold.cache.limit is ReuseLimit.PROMPT_LOGPROBS
        assert again.cache.cached_token_count == 0
        assert told(served, "again") == told(served, "cold")
        warm = served.ask("warm", tokens, logprobs=LogprobsWanted(top_count=TOP))
        assert warm.cache.cached_token_count == len(tokens) - 1
        assert warm.tokens == cold.tokens
        of_prompt, of_output = told(served, "warm")
        assert of_prompt == []
        for here, there in zip(of_output, told(served, "cold")[1], strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


def test_a_prompt_of_one_token_has_nothing_to_tell(tmp_path: Path) -> None:
    with CacheServer(tiny_model_dir(tmp_path, "llama"), None) as served:
        served.ask("one", [9], logprobs=WANTED)
        of_prompt, of_output = told(served, "one")
        assert of_prompt == [] and len(of_output) == 8
