"""A draft model in the whole engine: the tokens of plain decoding, and many at once where it guesses well."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import DraftCounts, Drafting, Speculation, SpeculationLimit
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.memory_model import DraftFootprint
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer, parameters_of
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.errors import ModelError

from tests.fixtures.engine import load_at_once
from tests.fixtures.models import VOCABULARY_SIZE, build, tiny_model_dir
from tests.fixtures.models.at_once import examine, load
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.cache.test_speculation import SAMPLINGS, outcome, submit

DRAFT = Speculation(draft_token_limit=4, drafting=Drafting.DRAFT_MODEL)
OUTPUT_TOKENS = 40


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_model_guesses_itself_nearly_always(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    # Longer than the tiny windows, and longer than what the draft caches take in one step.
    tokens = prompt(160)
    with CacheServer(folder, tmp_path / "blocks", draft=folder) as served:
        submit(served, "plain", tokens, speculation=None, max_output_tokens=OUTPUT_TOKENS)
        submit(served, "fast", tokens, speculation=DRAFT, max_output_tokens=OUTPUT_TOKENS)
        plain, _ = outcome(served, "plain")
        fast, drafts = outcome(served, "fast")
    assert fast == plain
    # The first token comes with the prompt; the last run may be cut by the limit.
    assert drafts.accepted_count == drafts.proposed_count == 4 * ((OUTPUT_TOKENS - 1 + 4) // 5)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_draft_caches_are_filled_with_the_prompt_so_that_the_first_row_guesses_already(
    tmp_path: Path, is_pipelined: bool
) -> None:
    """Filled behind it, 128 tokens a pass, they would guess nothing for eight passes."""
    folder = tiny_model_dir(tmp_path, "llama")
    with CacheServer(folder, None, is_enabled=False, draft=folder, is_pipelined=is_pipelined) as served:
        submit(served, "fast", prompt(1000), speculation=DRAFT, max_output_tokens=OUTPUT_TOKENS)
        _, drafts = outcome(served, "fast")
    assert drafts.accepted_count == drafts.proposed_count == 4 * ((OUTPUT_TOKENS - 1 + 4) // 5)


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_bad_draft_model_costs_work_and_no_token(tmp_path: Path, is_pipelined: bool) -> None:
    folder = tiny_model_dir(tmp_path, "qwen3")
    other = tiny_model_dir(tmp_path, "gemma3_text", seed=9)
    prompts = [prompt(2 * BLOCK + 3), prompt(60)]
    with CacheServer(folder, tmp_path / "blocks", draft=other, is_pipelined=is_pipelined) as served:
        for index, sampling in enumerate(SAMPLINGS):
            for place, tokens in enumerate(prompts):
                for kind, speculation in (("plain", None), ("fast", DRAFT)):
                    name = f"{kind} {index}.{place}"
                    submit(served, name, tokens, speculation=speculation, sampling=sampling)
        for index in range(len(SAMPLINGS)):
            for place in range(len(prompts)):
                tokens, drafts = outcome(served, f"fast {index}.{place}")
                assert tokens == outcome(served, f"plain {index}.{place}")[0]
                assert drafts.proposed_count > drafts.accepted_count


def test_a_row_that_gives_its_draft_model_up_keeps_no_draft_caches(tmp_path: Path) -> None:
    runner = runner_with(tiny_model_dir(tmp_path, "qwen3"), tiny_model_dir(tmp_path, "gemma3_text", seed=9))
    load_at_once(runner)
    tokens, name = tuple(prompt(60)), SequenceId(1)
    row = DecodeRow(SamplingParams(), prompt_token_ids=tokens, speculation=DRAFT)
    runner.open(name)
    runner.run([Chunk(name, tokens, row=row, speculation=DRAFT)])
    opened = runner._sequences[name]
    assert opened.drafted is not None and opened.is_guessing
    for _ in range(60):
        runner.run([])
    assert not opened.is_guessing and opened.drafted is None


def test_without_a_draft_model_the_request_decodes_plainly_and_says_why(tmp_path: Path) -> None:
    with CacheServer(tiny_model_dir(tmp_path, "llama"), None, is_enabled=False) as served:
        submit(served, "plain", prompt(20), speculation=None)
        submit(served, "asked", prompt(20), speculation=DRAFT)
        tokens, drafts = outcome(served, "asked")
        assert tokens == outcome(served, "plain")[0]
        assert drafts == DraftCounts(0, 0, SpeculationLimit.NO_DRAFT_MODEL)


def runner_with(folder: Path, draft: Path | None) -> ModelRunner:
    source = ModelSource(path=folder, model_id="tiny")
    return ModelRunner(
        source=source,
        tokenizer=load_tokenizer(source),
        settings=RunnerSettings(),
        clock=SystemClock(),
        draft_source=None if draft is None else ModelSource(path=draft, model_id="draft"),
    )


def load_error(folder: Path, draft: Path) -> ModelError:
    with pytest.raises(ModelError) as refused:
        load_at_once(runner_with(folder, draft))
    return refused.value


def test_others_go_on_between_the_parts_of_a_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "_SLICE_BYTES", 1)
    folder = tiny_model_dir(tmp_path, "llama")
    counts = [
        len(list(runner.load_steps(is_hurried=lambda: False)))
        for runner in (runner_with(folder, None), runner_with(folder, folder))
    ]
    weight_count = len(parameters_of(load(ModelSource(path=folder, model_id="tiny")).model))
    assert counts[1] - counts[0] > weight_count


@pytest.mark.parametrize("room", [1, 2, 7])
def test_a_draft_row_forgets_what_was_not_kept(room: int) -> None:
    model = build("gemma3_text")
    draft = DraftModel(
        model, facts=examine(model), vocabulary_size=VOCABULARY_SIZE, footprint=DraftFootprint()
    )
    told = draft.open(), draft.open()
    tokens = [prompt(30), prompt(33)]
    for step in range(6):
        for row, known in zip(told, tokens, strict=True):
            # Nothing of the guesses is right: other tokens came.
            more = known if not step else prompt(40 + room * step)[-room:]
            row.behind += more
            known += more if step else []
        draft.propose(told, count=5)
    fresh = draft.open(), draft.open()
    for row, again, known in zip(told, fresh, tokens, strict=True):
        row.behind += [7]
        again.behind += [*known, 7]
    guesses, _ = draft.propose(told, count=5)
    expected, _ = draft.propose(fresh, count=5)
    assert guesses is not None and expected is not None
    assert guesses.tolist() == expected.tolist()


def test_a_model_of_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    other = tiny_model_dir(tmp_path, "qwen3", name="other")
    table = other / "tokenizer.json"
    table.write_text(table.read_text().replace('"a"', '"ä"', 1))
    refusal = load_error(folder, other)
    assert "vocabulary" in str(refusal)


def test_a_model_whose_caches_cannot_go_back_is_refused_at_the_start(tmp_path: Path) -> None:
    refusal = load_error(tiny_model_dir(tmp_path, "llama"), tiny_model_dir(tmp_path, "mamba2"))
    assert "ArraysCache" in str(refusal)
