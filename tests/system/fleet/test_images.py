"""Pictures through the gateway, which prepares them itself: answered, found again, never mixed up."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from PIL import Image

from tests.fixtures.models.vision import tiny_vision_dir
from tests.system.fleet.conftest import BLOCK, MODEL, Fleet, fleet_of

pytestmark = pytest.mark.fleet

QUESTION = "what is it, and who had put it on the ground in that street?"
IMAGE_LIMIT = 2


def qwen3(folder: Path) -> Path:
    return tiny_vision_dir(folder, "qwen3_vl")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = ("--max-images", str(IMAGE_LIMIT))
    with fleet_of(tmp_path_factory.mktemp("images"), worker_options=options, make_model=qwen3) as started:
        yield started


def png(seed: int) -> str:
    """Return noise of 60 x 40 pixels, in base64."""
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def shown(*seeds: int) -> list[Any]:
    """Return a user's turn: pictures, and a question about them."""
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(seed)}"}} for seed in seeds
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def ask(fleet: Fleet, *seeds: int) -> Any:
    return fleet.openai().chat.completions.create(
        model=MODEL, messages=shown(*seeds), temperature=0, max_tokens=8
    )


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens if details else 0


def test_a_picture_is_answered_and_found_again_and_another_one_is_not(fleet: Fleet) -> None:
    cold = ask(fleet, 1)
    # Whichever of the two workers is asked: in three more turns one of them is asked again.
    warm = [ask(fleet, 1) for _ in range(3)]
    other = ask(fleet, 2)
    assert {answer.choices[0].message.content for answer in (cold, *warm)} == {
        cold.choices[0].message.content
    }
    count = cold.usage.prompt_tokens
    assert count > 40 + BLOCK, "the gateway has put the image's tokens in"
    assert (cached(cold), max(cached(answer) for answer in warm)) == (0, count - 1)
    assert (other.usage.prompt_tokens, cached(other) < BLOCK) == (count, True), (
        "as many tokens, another picture"
    )
    encoded = sum(fleet.stats(port).encoded_image_total for port in fleet.workers)
    assert 2 <= encoded <= 4


def test_anthropic_s_own_client_shows_pictures_too(fleet: Fleet) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": png(3)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    answer = fleet.anthropic().messages.create(
        model=MODEL,
        max_tokens=8,
        # The client's own methods have no temperature any more.
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": content}],
    )
    assert answer.content[0].text == ask(fleet, 3).choices[0].message.content


def test_more_pictures_than_a_worker_takes_are_refused(fleet: Fleet) -> None:
    import openai

    assert ask(fleet, *range(IMAGE_LIMIT)).usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(fleet, *range(IMAGE_LIMIT + 1))
