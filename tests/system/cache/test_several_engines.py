"""Several models on one inference thread: each answers as it does alone, comes and goes beside the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

KINDS = ("llama", "gemma3_text", "lfm2")
LONG = 10**6
_LITTLE_BYTES = 64 << 10
"""Far less than any of the models: some numbers stay until Python collects its garbage."""


@pytest.fixture
def thread() -> Iterator[InferenceThread]:
    made = InferenceThread(SystemClock())
    made.start()
    yield made
    made.end()
    assert made.join(timeout_s=BOUND_S)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny_model_dir(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def submit_all(served: CacheServer) -> list[str]:
    """Hand in prompts of several lengths, of which some begin alike."""
    names = [f"{number}" for number in range(4)]
    for number, name in enumerate(names):
        served.submit(name, prompt(5 * BLOCK + 7 * number, salt=number % 2), max_output_tokens=12)
    return names


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_each_of_three_models_answers_as_it_does_alone(
    folders: dict[str, Path], tmp_path: Path, is_pipelined: bool, thread: InferenceThread
) -> None:
    alone: dict[str, list[list[int]]] = {}
    for kind, folder in folders.items():
        with CacheServer(folder, None, is_pipelined=is_pipelined) as served:
            alone[kind] = [served.answer(name).tokens for name in submit_all(served)]
    with contextlib.ExitStack() as stack:
        beside = {
            kind: stack.enter_context(
                CacheServer(folder, tmp_path / kind, is_pipelined=is_pipelined, thread=thread)
            )
            for kind, folder in folders.items()
        }
        names = {kind: submit_all(served) for kind, served in beside.items()}
        for kind, served in beside.items():
            assert [served.answer(name).tokens for name in names[kind]] == alone[kind], kind


def test_a_model_loads_and_goes_while_another_decodes(
    folders: dict[str, Path],
    tmp_path: Path,
    thread: InferenceThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_loader, "_SLICE_BYTES", 1)
    with CacheServer(folders["llama"], None, thread=thread) as first:
        counts: list[int] = []
        load_steps = ModelRunner.load_steps

        def watched_steps(runner: ModelRunner, **kwargs: Any) -> Steps[ModelInfo]:
            steps = load_steps(runner, **kwargs)
            while True:
                counts.append(len(first.recorder.tokens_of("endless")))
                try:
                    yield next(steps)
                except StopIteration as end:
                    return cast("ModelInfo", end.value)

        monkeypatch.setattr(ModelRunner, "load_steps", watched_steps)
        first.submit("endless", prompt(BLOCK), max_output_tokens=LONG)
        for number in range(3):
            counts.clear()
            with CacheServer(folders["gemma3_text"], tmp_path / "blocks", thread=thread) as second:
                assert counts[-1] > counts[0] and len(set(counts)) > 2, "it stood still meanwhile"
                answer = second.ask(f"{number}", prompt(4 * BLOCK))
            assert second.recorder.states[-1] is EngineState.STOPPED
            assert first.engine.state is EngineState.READY
        assert answer.cache.ssd_token_count, "what was in RAM was written when the model went"
        first.engine.cancel(RequestId("endless"))
        assert first.ask("after", prompt(BLOCK)).tokens


@pytest.mark.parametrize("attention", [Attention.AUTO, Attention.ROWS])
def test_what_a_model_took_is_free_when_it_is_gone_or_could_not_be_loaded(
    folders: dict[str, Path], tmp_path: Path, attention: Attention, thread: InferenceThread
) -> None:
    broken = tiny_model_dir(tmp_path, "llama", name="broken", num_hidden_layers=6, shard_count=3)
    damaged = sorted(broken.glob("*.safetensors"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-64])
    sizes: list[int] = []
    with CacheServer(folders["llama"], None, thread=thread, attention=attention) as beside:
        beside.ask("before", prompt(3 * BLOCK))
        for number in range(10):
            failing = CacheServer(broken, None, thread=thread, attention=attention)
            failing.engine.start()
            failing.recorder.wait_for_state(EngineState.FAILED)
            assert failing.engine.join(timeout_s=BOUND_S) and failing.engine.error is not None
            assert "is the download complete" in failing.engine.error.message
            with CacheServer(folders["gemma3_text"], None, thread=thread, attention=attention) as going:
                going.ask(f"{number}", prompt(3 * BLOCK))
            beside.stats()  # answered by the thread, which is through with the others
            sizes.append(mx.get_active_memory())
        assert beside.ask("after", prompt(3 * BLOCK)).cache.ram_token_count
    assert max(sizes) - min(sizes) < _LITTLE_BYTES, "something of them stays"
