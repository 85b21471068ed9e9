"""Adapters on tiny models: each request gets its adapter's own text, in any company, and its own KV."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.domain.cache_commands import Explain, Explanation
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, CacheScope
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import CacheUse, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.identity.fingerprint import adapter_digest
from icehouse_server.engine.runner.model_loader import AdapterSource, attach
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.errors import ModelError, Reason
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from tests.fixtures.engine import load_at_once
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import adapter_source, tiny_adapter_dir
from tests.fixtures.models.at_once import load
from tests.fixtures.models.vocabulary import EOS_ID
from tests.system.cache.server import BLOCK, CacheServer

ONE, TWO = AdapterName("one"), AdapterName("two")
NAMES = (NO_ADAPTER, ONE, TWO)


def prompt(length: int, *, salt: int = 0) -> list[int]:
    return [3 + (salt * 31 + i * 7) % 290 for i in range(length)]


def adapters_of(folder: Path, model_dir: Path, *kinds: str) -> tuple[AdapterSource, ...]:
    """Return an adapter of each kind, named like `ONE` and `TWO`."""
    return tuple(
        adapter_source(name, tiny_adapter_dir(folder / "adapters", model_dir, seed=seed, kind=kind))
        for seed, (name, kind) in enumerate(zip((ONE, TWO), kinds, strict=True), start=1)
    )


def told_by_mlx_lm(model_dir: Path, adapter: Path | None, tokens: list[int], count: int) -> list[int]:
    """Decode greedily with mlx-lm's own way of applying an adapter."""
    model, _ = load_model(model_dir)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
    model.eval()
    caches = make_prompt_cache(model)
    feed = list(tokens)
    told: list[int] = []
    while len(told) < count and feed != [EOS_ID]:
        logits = model(mx.array([feed]), cache=caches)
        feed = [int(mx.argmax(logits[0, -1]).item())]
        told += feed
    return told


@pytest.mark.parametrize(
    ("architecture", "kinds", "bits"),
    [
        ("llama", ("lora", "dora"), None),
        ("llama", ("lora", "full"), None),
        ("llama", ("lora", "dora"), 4),
        ("gemma3_text", ("lora", "dora"), None),
        ("lfm2", ("lora", "lora"), None),
        ("qwen3_next", ("lora", "lora"), None),
    ],
)
def test_each_adapter_says_what_it_says_in_mlx_lm(
    tmp_path: Path, architecture: str, kinds: tuple[str, str], bits: int | None
) -> None:
    model_dir = tiny_model_dir(tmp_path, architecture, quantize_bits=bits)
    adapters = adapters_of(tmp_path, model_dir, *kinds)
    with CacheServer(model_dir, None, adapters=adapters) as served:
        told = {name: served.ask(f"r{name}", prompt(20), adapter=name).tokens for name in NAMES}
    paths = {NO_ADAPTER: None, **{adapter.name: adapter.path for adapter in adapters}}
    expected = {name: told_by_mlx_lm(model_dir, paths[name], prompt(20), 8) for name in NAMES}
    assert told == expected
    assert len({tuple(tokens) for tokens in told.values()}) == 3, "the adapters change the text"


SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9, seed=3), SamplingParams(top_k=5, seed=8))
ASKED = [
    # Three prompts, each of them with every adapter: what is shared by mistake is met at once.
    (f"{i}", prompt(BLOCK * 2 + 3 + i // 9, salt=i // 3 % 3), NAMES[i % 3], SAMPLINGS[i // 9])
    for i in range(27)
]


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A model, two adapters, and what each request of `ASKED` comes to alone."""

    model_dir: Path
    adapters: Sequence[AdapterSource]
    alone: list[list[int]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = tmp_path_factory.mktemp("mixed")
    model_dir = tiny_model_dir(folder, "llama")
    adapters = adapters_of(folder, model_dir, "lora", "dora")
    with CacheServer(model_dir, None, adapters=adapters) as served:
        alone = [
            served.ask(name, tokens, adapter=adapter, sampling=sampling, cache_use=CacheUse.OFF).tokens
            for name, tokens, adapter, sampling in ASKED
        ]
    assert len({tuple(tokens) for tokens in alone}) > 12
    return Mixed(model_dir, adapters, alone)


@pytest.mark.parametrize("is_pipelined", [True, False])
@pytest.mark.parametrize("cache_use", [CacheUse.READ_WRITE, CacheUse.OFF])
def test_a_mixed_batch_gives_each_adapter_its_own_text(
    mixed: Mixed, cache_use: CacheUse, is_pipelined: bool
) -> None:
    with CacheServer(mixed.model_dir, None, adapters=mixed.adapters, is_pipelined=is_pipelined) as served:
        for name, tokens, adapter, sampling in ASKED:
            served.submit(name, tokens, adapter=adapter, sampling=sampling, cache_use=cache_use)
        assert [served.answer(name).tokens for name, *_ in ASKED] == mixed.alone


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_adapters_share_no_kv_and_each_finds_its_own_again(tmp_path: Path, architecture: str) -> None:
    model_dir = tiny_model_dir(tmp_path, architecture)
    adapters = adapters_of(tmp_path, model_dir, "lora", "lora")
    tokens = prompt(5 * BLOCK)
    with CacheServer(model_dir, tmp_path / "blocks", adapters=adapters) as served:
        cold = {name: served.ask(f"cold{name}", tokens, adapter=name) for name in NAMES}
        warm = {name: served.ask(f"warm{name}", tokens, adapter=name) for name in NAMES}
        for name in NAMES:
            assert (cold[name].cache.cached_token_count, cold[name].cache.limit) == (0, ReuseLimit.NO_MATCH)
            assert warm[name].cache.ram_token_count > 0
            assert warm[name].tokens == cold[name].tokens
    with CacheServer(model_dir, tmp_path / "blocks", adapters=adapters[::-1]) as served:
        for name in NAMES:
            again = served.ask(f"again{name}", tokens, adapter=name)
            assert again.cache.ssd_token_count > 0 and again.tokens == cold[name].tokens


def test_an_adapter_replaced_in_place_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    old, new = adapters_of(tmp_path, model_dir, "lora", "lora")
    tokens = prompt(3 * BLOCK)
    with CacheServer(model_dir, tmp_path / "blocks", adapters=[old]) as served:
        served.ask("old", tokens, adapter=ONE)
    shutil.copy(new.path / "adapters.safetensors", old.path / "adapters.safetensors")
    with CacheServer(model_dir, tmp_path / "blocks", adapters=[adapter_source(ONE, old.path)]) as served:
        assert served.ask("new", tokens, adapter=ONE).cache.cached_token_count == 0


def test_what_an_adapter_computes_is_its_identity_and_how_it_was_trained_is_not(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    folder = tiny_adapter_dir(tmp_path, model_dir, seed=1)
    same = shutil.copytree(folder, tmp_path / "renamed")
    config = (same / "adapter_config.json").read_text()
    (same / "adapter_config.json").write_text(config.replace('"iters": 1', '"iters": 900'))
    louder = tiny_adapter_dir(tmp_path, model_dir, seed=1, name="louder", scale=8.0)
    flipped = shutil.copytree(folder, tmp_path / "flipped")
    content = bytearray((flipped / "adapters.safetensors").read_bytes())
    content[-1] ^= 1
    (flipped / "adapters.safetensors").write_bytes(bytes(content))
    assert adapter_digest(same) == adapter_digest(folder)
    assert len({adapter_digest(path) for path in (folder, louder, flipped)}) == 3


def test_orders_are_about_one_adapter(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    tokens = prompt(3 * BLOCK)
    with CacheServer(model_dir, None, adapters=adapters_of(tmp_path, model_dir, "lora", "lora")) as served:
        served.ask("one", tokens, adapter=ONE)
        known = {name: served.order(Explain(tuple(tokens), CacheScope(adapter=name))) for name in NAMES}
    counts = {name: len(answer.blocks) for name, answer in known.items() if isinstance(answer, Explanation)}
    assert counts == {NO_ADAPTER: 0, ONE: 3, TWO: 0}


def test_speculating_with_an_adapter_changes_nothing(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    with CacheServer(model_dir, None, adapters=adapters_of(tmp_path, model_dir, "lora", "lora")) as served:
        plain = served.ask("plain", prompt(20), adapter=ONE, max_output_tokens=24)
        served.submit("guessed", prompt(20), adapter=ONE, max_output_tokens=24, speculation=Speculation(4, 3))
        assert served.answer("guessed").tokens == plain.tokens


def runner_of(model_dir: Path, *adapters: AdapterSource, dtype: str = "") -> ModelRunner:
    source = model_loader.ModelSource(path=model_dir, model_id="tiny", dtype=dtype, adapters=adapters)
    return ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(),
        clock=SystemClock(),
    )


@pytest.mark.parametrize(("dtype", "bits"), [("", None), ("bfloat16", None), ("", 4)])
def test_an_adapter_takes_its_own_bytes_and_the_model_is_not_held_twice(
    tmp_path: Path, dtype: str, bits: int | None
) -> None:
    model_dir = tiny_model_dir(
        tmp_path, "llama", quantize_bits=bits, hidden_size=256, intermediate_size=1024, num_hidden_layers=4
    )
    one, two = adapters_of(tmp_path, model_dir, "lora", "dora")

    def load(*adapters: AdapterSource) -> tuple[int, ModelInfo]:
        gc.collect()
        mx.clear_cache()
        before_bytes = mx.get_active_memory()
        runner = runner_of(model_dir, *adapters, dtype=dtype)
        info = load_at_once(runner)
        mx.clear_cache()
        taken_bytes = mx.get_active_memory() - before_bytes
        runner.close()
        return taken_bytes, info

    bare_bytes, bare = load()
    taken_bytes, info = load(one, two)
    own_bytes = sum(adapter.weight_bytes for adapter in info.adapters)
    assert [adapter.kind for adapter in info.adapters] == ["lora", "dora"]
    assert info.resident_bytes == bare.weight_bytes + own_bytes
    slack_bytes = bare.weight_bytes // 20
    assert 0 < own_bytes < bare.weight_bytes // 3, "else the next line could not tell"
    # A trial of the model's passes leaves a few small arrays, and need not run twice in a process.
    assert own_bytes - 1024 <= taken_bytes - bare_bytes <= own_bytes + slack_bytes


@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ("other model", "does not match"),
        ("a tensor is missing", "lacks 1 tensors"),
        ("no config", "adapter_config.json"),
        ("no weights", "adapters.safetensors"),
        ("not json", "not valid JSON"),
    ],
)
def test_an_adapter_that_does_not_fit_says_so(tmp_path: Path, breakage: str, complaint: str) -> None:
    model_dir = tiny_model_dir(tmp_path, "llama")
    trained_on = model_dir
    if breakage == "other model":
        trained_on = tiny_model_dir(tmp_path, "llama", name="wide", hidden_size=96)
    path = tiny_adapter_dir(tmp_path, trained_on, seed=1)
    if breakage == "a tensor is missing":
        weights = mx.load(str(path / "adapters.safetensors"))
        assert isinstance(weights, dict)
        mx.eval(weights)
        del weights[next(name for name in weights if name.endswith("lora_a"))]
        mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    elif breakage == "no config":
        (path / "adapter_config.json").unlink()
    elif breakage == "no weights":
        (path / "adapters.safetensors").unlink()
    elif breakage == "not json":
        (path / "adapter_config.json").write_text("{")
    source = model_loader.ModelSource(path=model_dir, model_id="tiny")
    with pytest.raises(ModelError) as refused:
        attach(adapter_source("legal", path), load(source), source)
    assert refused.value.reason is Reason.MODEL_INVALID
    assert complaint in refused.value.message and str(path) in refused.value.message
    assert "\n" not in refused.value.message
