"""The house invariant: cache on, off, cold, warm, small, full or spoiled, a request yields the same tokens.

Real models in float32, whose logits have no near-ties; histories of requests, restarts and damage are
drawn, and every answer is compared with that of a server without a cache.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import CacheUse
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.storage.storage_settings import Codec

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.damage import DAMAGES, block_files
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

_ARCHITECTURES = ("llama", "gemma3_text", "falcon_h1", "llama4")
_STEM = prompt(6 * BLOCK)
_SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11),
    SamplingParams(
        temperature=0.8, seed=12, repetition_penalty=1.3, frequency_penalty=0.8, xtc_probability=0.5
    ),
    SamplingParams(
        presence_penalty=1.5, presence_window=4, logit_bias=((60, 2.0),), banned=((60, 61), (62,))
    ),
)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request: a piece of the common stem, then tokens of its own."""

    stem_count: int
    own_count: int
    output_count: int
    sampling_index: int
    use: CacheUse
    tenant: str
    session: str
    ends_session: bool

    @property
    def prompt(self) -> list[int]:
        return [*_STEM[: self.stem_count], *prompt(self.own_count, salt=self.stem_count + 1)]


@dataclasses.dataclass(frozen=True)
class Life:
    """One run of a server: its tiers, how prompts are cut, what is asked side by side, what is spoiled."""

    ram_share: float
    spill_policy: str
    codec: Codec
    chunk: int
    grid: int
    chunk_s: float
    damage: str | None
    damaged_share: float
    waves: list[list[Ask]]


asks = st.builds(
    Ask,
    stem_count=st.integers(0, len(_STEM)),
    own_count=st.integers(1, BLOCK + 2),
    output_count=st.sampled_from([1, 3, BLOCK + 2]),
    sampling_index=st.integers(0, len(_SAMPLINGS) - 1),
    use=st.sampled_from([CacheUse.READ_WRITE] * 3 + [CacheUse.READ_ONLY, CacheUse.WRITE_ONLY, CacheUse.OFF]),
    tenant=st.sampled_from(["", "", "other"]),
    session=st.sampled_from(["one", "one", "two", ""]),
    ends_session=st.booleans(),
)
lives = st.builds(
    Life,
    ram_share=st.sampled_from([0.0, 0.3, 1.0, 10.0]),
    spill_policy=st.sampled_from(["on_evict", "write_behind", "off"]),
    codec=st.sampled_from([Codec.RAW, Codec.PLANES]),
    chunk=st.sampled_from([BLOCK // 2, BLOCK, 2 * BLOCK]),
    grid=st.sampled_from([1, 2, BLOCK // 2]),
    # So short a time cuts every chunk to one step of the grid, and a little more leaves some longer.
    chunk_s=st.sampled_from([0.0, 1e-9, 0.002]),
    damage=st.sampled_from([None, None, *sorted(DAMAGES)]),
    damaged_share=st.sampled_from([0.3, 1.0]),
    waves=st.lists(st.lists(asks, min_size=1, max_size=3), min_size=1, max_size=3),
)


class Reference:
    """What a server without a cache says; each question is asked once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stem_bytes = 0
        self._known: dict[tuple, list[int]] = {}

    def tokens(self, wanted: list[Ask]) -> list[list[int]]:
        new = [ask for ask in wanted if self._key(ask) not in self._known]
        if new:
            with CacheServer(self.folder, None, is_enabled=False) as served:
                for ask in new:
                    answer = served.ask(
                        "q",
                        ask.prompt,
                        max_output_tokens=ask.output_count,
                        sampling=_SAMPLINGS[ask.sampling_index],
                    )
                    served.recorder.events.clear()
                    self._known[self._key(ask)] = answer.tokens
        return [self._known[self._key(ask)] for ask in wanted]

    def _key(self, ask: Ask) -> tuple:
        return (ask.stem_count, ask.own_count, ask.output_count, ask.sampling_index)


@pytest.fixture(scope="module", params=_ARCHITECTURES)
def reference(request, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    made = Reference(tiny_model_dir(tmp_path_factory.mktemp("models"), request.param))
    with CacheServer(made.folder, None) as served:
        served.ask("measure", _STEM, max_output_tokens=0)
        made.stem_bytes = served.cache.tree.ram.used_bytes
    return made


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(lives, min_size=1, max_size=3))
def test_every_history_gives_the_same_tokens(reference: Reference, history: list[Life]) -> None:
    play(history, reference)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(lives, min_size=1, max_size=4))
def test_many_histories_give_the_same_tokens(reference: Reference, history: list[Life]) -> None:
    play(history, reference)


def play(history: list[Life], reference: Reference) -> None:
    """Let one life follow the other in one directory."""
    directory = Path(tempfile.mkdtemp(prefix="icehouse-"))
    try:
        for life in history:
            run(life, reference, directory)
    finally:
        shutil.rmtree(directory)


def run(life: Life, reference: Reference, directory: Path) -> None:
    """Play one life and compare every answer."""
    expected = reference.tokens([ask for wave in life.waves for ask in wave])
    served = CacheServer(
        reference.folder,
        directory,
        ram_bytes=int(life.ram_share * reference.stem_bytes),
        spill_policy=life.spill_policy,
        codec=life.codec,
        chunk=life.chunk,
        grid=life.grid,
        chunk_s=life.chunk_s,
    )
    got: list[list[int]] = []
    with served:
        if life.damage is not None:
            files = block_files(directory)
            DAMAGES[life.damage](files[: int(len(files) * life.damaged_share)])
        for number, wave in enumerate(life.waves):
            for index, ask in enumerate(wave):
                served.submit(
                    f"{number} {index}",
                    ask.prompt,
                    max_output_tokens=ask.output_count,
                    sampling=_SAMPLINGS[ask.sampling_index],
                    tenant=Tenant(ask.tenant),
                    cache_use=ask.use,
                    session_id=ask.session,
                    ends_session=ask.ends_session,
                )
            got += [served.answer(f"{number} {index}").tokens for index in range(len(wave))]
    assert got == expected
