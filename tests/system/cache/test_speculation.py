"""Speculation in the whole engine: the same tokens as plain decoding, alone and beside others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from icehouse_server.domain.events import Delta, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import (
    CacheUse,
    DraftCounts,
    GenerationRequest,
    LogprobsWanted,
    Speculation,
    SpeculationLimit,
)
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.runner import speculation
from icehouse_server.engine.runner.speculation import Probe

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import THINKING
from tests.fixtures.models.vocabulary import tokenizer
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

LOOKUP = Speculation(draft_token_limit=6, ngram_token_limit=3)
OUTPUT_TOKENS = 40


def repetitive(*, block_count: int = 2) -> list[int]:
    """A prompt that says the same thing again and again, so that an output has something to quote."""
    phrase = prompt(BLOCK // 2)
    return [*phrase * (2 * block_count), 7, 8, 9]


def submit(
    served: CacheServer,
    name: str,
    tokens: Sequence[int],
    *,
    speculation: Speculation | None,
    sampling: SamplingParams | None = None,
    stop: tuple[str, ...] = (),
    max_output_tokens: int = OUTPUT_TOKENS,
    cache_use: CacheUse = CacheUse.READ_WRITE,
) -> None:
    served.engine.submit(
        GenerationRequest(
            request_id=RequestId(name),
            prompt_token_ids=tuple(tokens),
            max_output_tokens=max_output_tokens,
            sampling=sampling or SamplingParams(),
            stop=stop,
            arrival_time=0.0,
            speculation=speculation,
            cache_use=cache_use,
            logprobs=LogprobsWanted(),
        )
    )


def outcome(served: CacheServer, name: str) -> tuple[list[int], DraftCounts]:
    end = served.recorder.wait_for_end(name)
    assert isinstance(end, Finished), end
    for event in served.recorder.events[name]:
        if isinstance(event, Delta):
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
    return served.recorder.tokens_of(name), end.usage.drafts


@pytest.fixture(
    params=[
        ("stays", True),
        ("moves", False),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in [("stays", False), ("moves", True), ("as it is", False), ("as it is", True)]
        ),
    ],
    ids=lambda way: f"{way[0]}, {'pipelined' if way[1] else 'plain'}",
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """How often a row stops guessing and guesses again (never, when it pays, all the time), and whether
    passes are pipelined: each of these in `make test`, and each with each at length."""
    movement, is_pipelined = request.param
    move(movement, monkeypatch)
    return movement, is_pipelined


def move(movement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if movement == "stays":
        monkeypatch.setattr(speculation, "_LOOKUP_PROBE", Probe(step_count=1, least_accepted_count=0))
    if movement == "moves":
        monkeypatch.setattr(speculation, "_LOOKUP_PROBE", Probe(step_count=2, least_accepted_count=99))
        monkeypatch.setattr(speculation, "_FIRST_RUN", 0)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.4, seed=11),
    SamplingParams(temperature=0.3, seed=12, top_p=0.9, logit_bias=((50, 2.0),), min_output_token_count=3),
]


ASKED = {
    f"{name}.{place}": (tokens, sampling, LOOKUP if (name + place) % 2 == 0 else None)
    for name, sampling in enumerate(SAMPLINGS)
    for place, tokens in enumerate((repetitive(), prompt(2 * BLOCK + 3)))
}
"""Every second one speculates, the others decode in one batch beside them."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """A model, and what each of `ASKED` comes to where nothing speculates and no pass is pipelined."""

    folder: Path
    tokens: dict[str, list[int]]


@pytest.fixture(
    scope="module", params=["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "llama4"]
)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tiny_model_dir(tmp_path_factory.mktemp("models"), request.param)
    with CacheServer(folder, None, is_enabled=False) as served:
        for name, (tokens, sampling, _) in ASKED.items():
            submit(served, name, tokens, speculation=None, sampling=sampling)
        return Plain(folder, {name: outcome(served, name)[0] for name in ASKED})


def test_the_tokens_are_those_of_plain_decoding(plain: Plain, tmp_path: Path, way: tuple[str, bool]) -> None:
    _, is_pipelined = way
    with CacheServer(plain.folder, tmp_path / "blocks", is_pipelined=is_pipelined) as served:
        for turn in ("cold", "warm"):
            for name, (tokens, sampling, speculation) in ASKED.items():
                submit(served, f"{turn} {name}", tokens, speculation=speculation, sampling=sampling)
            found = {name: outcome(served, f"{turn} {name}")[0] for name in ASKED}
            assert found == plain.tokens, turn


@pytest.mark.parametrize("output_count", [OUTPUT_TOKENS, pytest.param(24, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize(
    ("architecture", "kv_bits"), [("qwen3", 0), ("qwen3", 8), ("gemma3_text", 0), ("lfm2", 0)]
)
def test_the_next_turn_reuses_what_a_speculating_one_left(
    tmp_path: Path, architecture: str, kv_bits: int, output_count: int, way: tuple[str, bool]
) -> None:
    movement, is_pipelined = way
    folder = tiny_model_dir(tmp_path, architecture)
    first = repetitive()
    with CacheServer(folder, tmp_path / "blocks", kv_bits=kv_bits, is_pipelined=is_pipelined) as served:
        # Some of these ends are inside a run of accepted guesses, past which the caches already are.
        submit(served, "first", first, speculation=LOOKUP, max_output_tokens=output_count)
        said, drafts = outcome(served, "first")
        if output_count == OUTPUT_TOKENS and movement == "stays":
            assert drafts.proposed_count > drafts.accepted_count > 0, (
                "nothing was taken back, or nothing kept"
            )
        second = [*first, *said, *prompt(5)]
        submit(served, "second", second, speculation=None)
        warm = served.answer("second")
        assert warm.cache.cached_token_count >= (len(first) + len(said)) // BLOCK * BLOCK - BLOCK
    with CacheServer(folder, None, is_enabled=False, kv_bits=kv_bits) as served:
        submit(served, "second", second, speculation=None)
        assert outcome(served, "second")[0] == warm.tokens


def test_guesses_save_steps_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move("stays", monkeypatch)
    with CacheServer(tiny_model_dir(tmp_path, "qwen3"), None, is_enabled=False) as served:
        submit(served, "plain", repetitive(), speculation=None)
        plain, none = outcome(served, "plain")
        assert none == DraftCounts()
        before = served.stats()[0].step_total
        submit(served, "fast", repetitive(), speculation=LOOKUP)
        tokens, drafts = outcome(served, "fast")
        steps = served.stats()[0].step_total - before
    assert tokens == plain
    assert 4 <= drafts.accepted_count <= drafts.proposed_count
    assert steps <= OUTPUT_TOKENS - drafts.accepted_count + 3 and drafts.limit is SpeculationLimit.NONE


def test_eight_that_speculate_take_no_more_passes_than_eight_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each used to be a pass of its own: 64 passes for what took 24 plainly."""
    move("stays", monkeypatch)
    prompts = [[*repetitive(), number] for number in range(20, 28)]
    passes: list[int] = []
    told: list[list[list[int]]] = []
    with CacheServer(tiny_model_dir(tmp_path, "qwen3"), None, is_enabled=False) as served:
        for speculation in (None, LOOKUP):
            before = served.stats()[0].step_total
            for number, tokens in enumerate(prompts):
                submit(served, f"{number} {speculation is None}", tokens, speculation=speculation)
            told.append([outcome(served, f"{number} {speculation is None}")[0] for number in range(8)])
            passes.append(served.stats()[0].step_total - before)
    assert told[0] == told[1]
    # They come one after the other, so a few passes are of those alone that came first.
    assert passes[1] <= OUTPUT_TOKENS + 2 * len(prompts), passes


def test_what_cannot_speculate_decodes_plainly_and_says_why(tmp_path: Path) -> None:
    sampling = SamplingParams(repetition_penalty=1.2)
    with CacheServer(tiny_model_dir(tmp_path, "llama"), None, is_enabled=False) as served:
        submit(served, "plain", repetitive(), speculation=None, sampling=sampling)
        submit(served, "asked", repetitive(), speculation=LOOKUP, sampling=sampling)
        tokens, drafts = outcome(served, "asked")
        assert tokens == outcome(served, "plain")[0]
        assert drafts == DraftCounts(0, 0, SpeculationLimit.SAMPLING)


@pytest.mark.parametrize("stop_at", [7, 23, 37])
def test_a_stop_inside_a_run_of_guesses_ends_it_there(tmp_path: Path, stop_at: int) -> None:
    with CacheServer(tiny_model_dir(tmp_path, "qwen3"), None, is_enabled=False) as served:
        submit(served, "plain", repetitive(), speculation=None)
        plain, _ = outcome(served, "plain")
        submit(served, "short", repetitive(), speculation=LOOKUP, max_output_tokens=stop_at)
        assert outcome(served, "short")[0] == plain[:stop_at]
        text = "".join(e.text for e in served.recorder.events["plain"] if isinstance(e, Delta))
        stop = text[stop_at : stop_at + 3]
        for name, speculation in (("stopped plain", None), ("stopped fast", LOOKUP)):
            submit(served, name, repetitive(), speculation=speculation, stop=(stop,))
            outcome(served, name)
        texts = [
            "".join(e.text for e in served.recorder.events[name] if isinstance(e, Delta))
            for name in ("stopped plain", "stopped fast")
        ]
        assert texts[0] == texts[1] == text[: text.index(stop)]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("company", [0, 2])
def test_a_row_speculates_again_once_its_text_repeats_itself(
    tmp_path: Path, is_pipelined: bool, company: int
) -> None:
    """The model goes round through all its printable tokens: new ones first, then none but known ones."""
    folder = chain_model_dir(tmp_path / "model", THINKING, ["go"], first="Ċ")
    vocabulary = tokenizer().get_vocab()
    round_length = sum(text.isascii() and text.isalnum() for text in vocabulary)
    limits = {"max_output_tokens": 3 * round_length}
    with CacheServer(folder, None, is_enabled=False, is_pipelined=is_pipelined) as served:
        submit(served, "plain", [3, vocabulary["Ċ"]], speculation=None, **limits)
        plain, _ = outcome(served, "plain")
        assert plain[-round_length:] == plain[-2 * round_length : -round_length], "it goes round"
        before = served.stats()[0].step_total
        for number in range(company):
            submit(served, f"beside {number}", [4 + number, vocabulary["Ċ"]], speculation=None, **limits)
        submit(served, "asked", [3, vocabulary["Ċ"]], speculation=LOOKUP, **limits)
        tokens, drafts = outcome(served, "asked")
        steps = served.stats()[0].step_total - before
        for number in range(company):
            assert outcome(served, f"beside {number}")[0] == plain
    assert tokens == plain
    assert drafts.limit is SpeculationLimit.NONE and drafts.accepted_count > 1.5 * round_length
    # Beside others on a device that runs ahead it guesses in every second pass.
    most = 1.8 if company and is_pipelined else 1.6
    assert steps < most * round_length, "two rounds of three were guessed, several tokens a step"


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_row_whose_guesses_come_to_nothing_joins_the_batch_and_says_so(
    tmp_path: Path, is_pipelined: bool
) -> None:
    folder = tiny_model_dir(tmp_path, "qwen3")
    wild = [SamplingParams(temperature=30.0, seed=seed) for seed in range(3)]
    with CacheServer(folder, tmp_path / "blocks", is_pipelined=is_pipelined) as served:
        for number, sampling in enumerate(wild):
            submit(served, f"plain {number}", repetitive(), speculation=None, sampling=sampling)
        plain = [outcome(served, f"plain {number}")[0] for number in range(3)]
        for number, sampling in enumerate(wild):
            submit(served, f"asked {number}", repetitive(), speculation=LOOKUP, sampling=sampling)
        for number in range(3):
            tokens, drafts = outcome(served, f"asked {number}")
            assert tokens == plain[number]
            assert drafts.limit is SpeculationLimit.ACCEPTANCE and drafts.accepted_count < 6
        submit(served, "next", [*repetitive(), *plain[0], 5], speculation=None)
        assert served.answer("next").cache.cached_token_count >= 4 * BLOCK
