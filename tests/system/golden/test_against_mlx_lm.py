"""Greedy text is what mlx-lm's own single-sequence generation writes, with the cache on and off.

In float32, on models whose logits have no near-ties: chunks, padding and batches may change the last bits
of a logit, never the likeliest token.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx_lm
import pytest
from icehouse_server.domain.request import CacheUse

from tests.fixtures.models import ARCHITECTURES, tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer

THE = 262
"""Spelled "the": the prompts end with a whole character, or the texts would begin with its other half."""
PROMPT = [*(3 + (i * 7 + i * i) % 290 for i in range(5 * BLOCK + 7)), THE]
OTHER = [*(3 + (i * 11 + i * i) % 290 for i in range(3 * BLOCK)), THE]
OUTPUT_COUNT = 40


def written_by_mlx_lm(folder: Path, prompt: list[int]) -> tuple[list[int], str]:
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    steps = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=OUTPUT_COUNT))
    # Its detokenizer leaves byte 0 as the vocabulary spells it.
    return [step.token for step in steps], "".join(step.text for step in steps).replace("\u0100", "\0")


@dataclasses.dataclass(frozen=True)
class Written:
    """A model, and what mlx-lm writes with it after `PROMPT` ("p") and `OTHER` ("o")."""

    folder: Path
    texts: dict[str, tuple[list[int], str]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tiny_model_dir(tmp_path_factory.mktemp("models"), request.param)
    texts = {name: written_by_mlx_lm(folder, prompt) for name, prompt in (("p", PROMPT), ("o", OTHER))}
    assert len(set(texts["p"][0])) > OUTPUT_COUNT // 4, "a text that repeats itself proves little"
    return Written(folder, texts)


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_greedy_text_is_the_same(theirs: Written, is_pipelined: bool) -> None:
    expected = theirs.texts
    with CacheServer(theirs.folder, None, is_pipelined=is_pipelined) as served:

        def written(name: str) -> tuple[list[int], str]:
            answer = served.answer(name)
            # mlx-lm drops the space that a text begins with; for us it continues the prompt's.
            return answer.tokens, served.recorder.text_of(name).removeprefix(" ")

        served.submit("p-off", PROMPT, max_output_tokens=OUTPUT_COUNT, cache_use=CacheUse.OFF)
        served.submit("o-off", OTHER, max_output_tokens=OUTPUT_COUNT, cache_use=CacheUse.OFF)
        served.submit("p-cold", PROMPT, max_output_tokens=OUTPUT_COUNT)
        for name in ("p-off", "o-off", "p-cold"):
            assert written(name) == expected[name[0]], name
        served.submit("p-warm", PROMPT, max_output_tokens=OUTPUT_COUNT)
        served.submit("o-cold", OTHER, max_output_tokens=OUTPUT_COUNT)
        for name in ("p-warm", "o-cold"):
            assert written(name) == expected[name[0]], name
        assert served.answer("p-warm").cache.cached_token_count == len(PROMPT) - 1
        assert served.answer("p-cold").cache.cached_token_count == 0
