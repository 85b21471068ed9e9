"""The engine on tiny real models: the same text alone and in company, for every way of decoding."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.events import Failed, Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo, PassSplit
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.mailbox import Mailbox
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward.splits import PassFacts
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.engine.runner.warm_up import CommonParts, KnownModel, ModelKey
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import ModelError
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.engine import Recorder, load_at_once, no_prefix
from tests.fixtures.models import build, tiny_model_dir
from tests.fixtures.models.at_once import load
from tests.fixtures.patience import BOUND_S

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.2, top_p=0.8, seed=2),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.02, seed=3),
    SamplingParams(frequency_penalty=1.5, repetition_penalty=1.3, repetition_window=5),
    SamplingParams(temperature=0.8, presence_penalty=2.0, xtc_probability=0.5, seed=4),
    SamplingParams(temperature=0.9, banned=((40,), (41, 42)), logit_bias=((41, 3.0),), seed=5),
)


@dataclasses.dataclass
class Running:
    engine: Engine
    recorder: Recorder
    thread: InferenceThread

    def ask(self, requests: list[GenerationRequest]) -> dict[str, list[int]]:
        for item in requests:
            self.engine.submit(item)
        for item in requests:
            assert isinstance(self.recorder.wait_for_end(item.request_id), Finished)
        return {r.request_id: self.recorder.tokens_of(r.request_id) for r in requests}

    def stop(self) -> None:
        self.engine.drain(grace_s=BOUND_S)
        self.thread.end()
        assert self.thread.join(timeout_s=BOUND_S)


def start(folder: Path, *, chunk: int = 16, is_pipelined: bool = True) -> Running:
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    tokenizer = model_loader.load_tokenizer(source)
    recorder = Recorder()
    thread = InferenceThread(SystemClock())
    engine = Engine(
        runner=ModelRunner(
            source=source,
            tokenizer=tokenizer,
            settings=RunnerSettings(is_pipelined=is_pipelined),
            clock=SystemClock(),
        ),
        make_prefix=lambda: no_prefix(SystemClock()),
        settings=EngineSettings(
            limits=SchedulerLimits(running_limit=20, prefilling_limit=4, prefill_chunk_token_count=chunk),
            waiting=WaitingLimits(request_limit=100),
        ),
        tokenizer=tokenizer,
        mailbox=Mailbox(limit=100, changed=thread.changed),
        listener=recorder,
        thread=thread,
        budget=MemoryBudget(),
    )
    thread.start()
    engine.start()
    recorder.wait_for_state(EngineState.READY)
    return Running(engine, recorder, thread)


def requests(prefix: str, count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=RequestId(f"{prefix}{i}"),
            prompt_token_ids=tuple(3 + (i * 31 + j * 7) % 290 for j in range(2 + i * 3)),
            max_output_tokens=4 + i % 7,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            stop=(),
            arrival_time=0.0,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "falcon_h1", "llama4"])
def test_sixteen_together_get_what_each_gets_alone(
    tmp_path: Path, architecture: str, is_pipelined: bool
) -> None:
    running = start(tiny_model_dir(tmp_path, architecture), is_pipelined=is_pipelined)
    try:
        together = running.ask(requests("together", 16))
        alone: dict[str, list[int]] = {}
        for item in requests("alone", 16):
            alone |= running.ask([item])
    finally:
        running.stop()
    assert list(together.values()) == list(alone.values())
    assert len({tuple(tokens) for tokens in together.values()}) > 8, "the outputs differ from each other"


@pytest.mark.parametrize(
    ("architecture", "splits"),
    [("llama", (PassSplit.ATTENTION,)), ("lfm2", (PassSplit.ATTENTION, PassSplit.MODULE))],
)
def test_a_model_s_facts_say_what_sequences_share_of_a_pass(
    tmp_path: Path, architecture: str, splits: tuple[PassSplit, ...]
) -> None:
    source = model_loader.ModelSource(path=tiny_model_dir(tmp_path, architecture), model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(),
        clock=SystemClock(),
    )
    assert load_at_once(runner).pass_splits == splits


def test_a_model_that_fits_no_way_is_served_row_by_row_and_says_so_in_the_log_and_in_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fits_none = PassFacts(caches=(), hidden_size=1, reason="it reads what it should not")

    def examine_steps(*_: Any, **__: Any) -> Generator[None, None, PassFacts]:
        yield
        return fits_none

    monkeypatch.setattr("icehouse_server.engine.runner.runner.examine_steps", examine_steps)
    source = model_loader.ModelSource(path=tiny_model_dir(tmp_path, "llama"), model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(),
        clock=SystemClock(),
    )
    with caplog.at_level("WARNING", logger="icehouse.engine"):
        assert load_at_once(runner).pass_splits == (PassSplit.ALONE,)
    (told,) = [record for record in caplog.records if record.message == "forward_pass_not_shared"]
    assert vars(told)["detail"] == "it reads what it should not" and vars(told)["ways"] == "alone"


def test_a_model_that_comes_back_is_not_examined_again(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    known: dict[ModelKey, KnownModel] = {}

    def loaded(fingerprint: str) -> tuple[ModelInfo, int]:
        source = model_loader.ModelSource(path=folder, model_id="tiny")
        runner = ModelRunner(
            source=source,
            tokenizer=model_loader.load_tokenizer(source),
            settings=RunnerSettings(),
            clock=SystemClock(),
            fingerprint_hex=fingerprint,
            common=CommonParts(known=known),
        )
        steps = runner.load_steps(is_hurried=lambda: False)
        count = 0
        while True:
            try:
                next(steps)
                count += 1
            except StopIteration as end:
                runner.close()
                return end.value, count

    first, first_count = loaded("ab")
    (kept,) = known.values()
    # What is kept is what counts, so that it shows whether it was looked at.
    seen = dataclasses.replace(kept.passes, reason="known")
    known[next(iter(known))] = dataclasses.replace(kept, passes=seen)
    again, again_count = loaded("ab")
    assert dataclasses.replace(again, system_digest_hex=first.system_digest_hex) == first
    assert again_count < first_count
    assert [each.passes.reason for each in known.values()] == ["known"]
    loaded("cd")
    assert [each.passes.reason for each in known.values()] == ["known", kept.passes.reason]


def test_greedy_text_is_what_the_model_says_by_itself(tmp_path: Path) -> None:
    running = start(tiny_model_dir(tmp_path, "llama"))
    item = dataclasses.replace(
        requests("x", 12)[11], sampling=SamplingParams(), max_output_tokens=12, request_id=RequestId("x")
    )
    try:
        (tokens,) = running.ask([item]).values()
    finally:
        running.stop()
    model = build("llama")
    caches = make_prompt_cache(model)
    expected: list[int] = []
    feed = list(item.prompt_token_ids)
    while len(expected) < len(tokens):
        logits = model(mx.array([feed]), cache=caches)
        feed = [mx.argmax(logits[0, -1]).item()]  # type: ignore[list-item]
        expected += feed
    assert tokens == expected


def test_a_cancelled_stream_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    running = start(tiny_model_dir(tmp_path, "llama"))
    try:
        (undisturbed,) = running.ask(requests("alone", 6)[5:]).values()
        endless = dataclasses.replace(requests("endless", 1)[0], max_output_tokens=400)
        running.engine.submit(endless)
        item = requests("beside", 6)[5]
        running.engine.submit(item)
        running.engine.cancel(RequestId("endless0"))
        assert isinstance(running.recorder.wait_for_end("endless0"), Failed)
        assert isinstance(running.recorder.wait_for_end(item.request_id), Finished)
    finally:
        running.stop()
    assert running.recorder.tokens_of(item.request_id) == undisturbed


def test_the_runner_refuses_a_second_thread(tmp_path: Path) -> None:
    source = model_loader.ModelSource(path=tiny_model_dir(tmp_path, "llama"), model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(),
        clock=SystemClock(),
    )
    loader = threading.Thread(target=load_at_once, args=(runner,))
    loader.start()
    loader.join(BOUND_S)
    with pytest.raises(AssertionError, match="touched the runner"):
        runner.run([])


@pytest.mark.parametrize("breakage", ["no folder", "no config", "bad config", "no weights", "no tokenizer"])
def test_a_broken_folder_says_what_is_wrong(tmp_path: Path, breakage: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    if breakage == "no folder":
        folder = tmp_path / "nowhere"
    elif breakage == "no config":
        (folder / "config.json").unlink()
    elif breakage == "bad config":
        (folder / "config.json").write_text("{")
    elif breakage == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "tokenizer.json").unlink()
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    with pytest.raises(ModelError) as refused:
        model_loader.load_tokenizer(source)
        load(source)
    assert str(folder) in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_is_converted_on_load(tmp_path: Path, dtype: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama", dtype="bfloat16")
    source = model_loader.ModelSource(path=folder, model_id="tiny", dtype=dtype)
    loaded = load(source)
    info = model_loader.describe(loaded, source, model_loader.load_tokenizer(source), "")
    assert info.dtype == dtype
    assert info.context_token_limit > 0 and info.vocabulary_size > 100
