"""Prompts with pictures: cold = RAM = SSD after a restart = mlx-vlm's own generation, and no hit on another.

In float32 on a tiny SmolVLM, whose pictures have four tiles and a whole, tiny Qwen-VLs, whose attention
knows their rows and columns, a tiny Gemma 3, whose pictures are seen whole, a tiny Pixtral and Mistral 3,
whose pictures are rows with text between them: some 16 to 35 tokens, over two blocks or four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.events import CacheReport
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import ImageSpan
from icehouse_server.engine.kv_cache.regions import array_of
from icehouse_server.engine.runner import model_loader
from PIL import Image

from tests.system.cache.server import BLOCK, Answer, CacheServer

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.vision.image_reader import spans_of
from icehouse_server.vision.processor import ImageProcessor, open_processor

from tests.fixtures.models import whole_images
from tests.fixtures.models.vision import FAMILIES, VisionFamily, tiny_vision_dir
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE

OUTPUT_COUNT = 12
TEXT = "what is it, and who had put it on the ground in that street, where no one of us would"


def picture(seed: int, *, changed: bool = False) -> Image.Image:
    """Return noise of 60 x 40 pixels; changed in one of them only."""
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    if changed:
        pixels[39, 59] = 255 - pixels[39, 59]
    return Image.fromarray(pixels)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt with pictures, as the engine takes it."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A folder, and what reads it: our own parts, and mlx-vlm whole."""

    folder: Path
    family: VisionFamily
    processor: ImageProcessor
    tokenizer: Any
    reference: Any
    reference_processor: Any
    _known: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def expected_at(self, place: str, *, ids: list[int]) -> list[int]:
        """Return what is expected of one of `PLACES`, which several tests ask for."""
        if place not in self._known:
            self._known[place] = self.expected(PLACES[place], ids=ids)
        return self._known[place]

    def asked(self, parts: Sequence[str | Image.Image]) -> Asked:
        text, prepared = "", []
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                prepared.append(self.processor.prepare(part))
                text += f"{self.family.opening}{prepared[-1].text}{self.family.closing}"
        ids = self.tokenizer.spell(text)
        return Asked(ids, spans_of(ids, [each.image for each in prepared], image_token_id=VOCABULARY_SIZE))

    def expected(self, parts: Sequence[str | Image.Image], *, ids: list[int]) -> list[int]:
        """Return what mlx-vlm generates by itself, from the same tokens as ours; of Gemma 3 what its layers
        give under the masks that it was trained with."""
        from mlx_vlm.generate.ar import generate_step

        images = [part for part in parts if not isinstance(part, str)]
        mark = f"{self.family.opening}{self.family.mark}{self.family.closing}"
        text = "".join(part if isinstance(part, str) else mark for part in parts)
        # Nested for these processors, which take a flat list for one prompt each.
        shown: Any = [images] if self.family in (FAMILIES["smolvlm"], FAMILIES["idefics3"]) else images
        inputs = self.reference_processor(
            images=shown if images else None, text=[text], add_special_tokens=False
        )
        assert np.array(inputs["input_ids"])[0].tolist() == ids
        tensors = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        if self.family is FAMILIES["lfm2_vl"]:  # mlx-vlm's processor gives numpy's
            tensors = {name: mx.array(np.array(tensor)) for name, tensor in tensors.items()}
        pixels = tensors.pop("pixel_values", None)
        if self.family is FAMILIES["gemma3"]:
            return whole_images.generated(self.reference, ids, pixels, count=OUTPUT_COUNT)
        steps = generate_step(
            mx.array([ids]),
            self.reference,
            pixels,
            None,
            max_tokens=OUTPUT_COUNT,
            temperature=0.0,
            **tensors,
        )
        return [int(token) for token, _ in steps][:OUTPUT_COUNT]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    from mlx_vlm.utils import load

    folder = tiny_vision_dir(tmp_path_factory.mktemp("models"), request.param)
    tokenizer = model_loader.load_tokenizer(model_loader.ModelSource(path=folder, model_id="tiny"))
    processor = open_processor(folder, FAMILIES[request.param].config()["model_type"])
    return Model(folder, FAMILIES[request.param], processor, tokenizer, *load(str(folder)))


PLACES = {
    "first": [picture(1), f" {TEXT}"],
    "middle": [f"{TEXT}: ", picture(1), f" {TEXT}"],
    "last": [f"{TEXT}: ", picture(1)],
    "twice": [picture(1), " or this one? ", picture(1), TEXT],
    "two": ["one: ", picture(1), picture(2), TEXT],
    "none": [TEXT],
}
OTHERS_SHOW = ("first", "none")
"""What the places beside them would nearly always show too."""


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([place for place in PLACES if place not in OTHERS_SHOW], id="some"),
        pytest.param(OTHERS_SHOW, id="others", marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_from_nothing_from_ram_from_ssd_and_of_mlx_vlm(
    model: Model, tmp_path: Path, places: Sequence[str]
) -> None:
    asks = {place: model.asked(PLACES[place]) for place in places}

    def answers(served: CacheServer, name: str) -> dict[str, Answer]:
        # Each place is another tenant's, so that none finds what another one left.
        return {
            place: served.ask(
                f"{name} {place}",
                asked.token_ids,
                max_output_tokens=OUTPUT_COUNT,
                images=asked.images,
                tenant=Tenant(place),
            )
            for place, asked in asks.items()
        }

    with CacheServer(model.folder, tmp_path) as served:
        cold, ram = answers(served, "cold"), answers(served, "ram")
    with CacheServer(model.folder, tmp_path) as served:
        ssd = answers(served, "ssd")
    for place, asked in asks.items():
        reused = len(asked.token_ids) - 1
        expected = model.expected_at(place, ids=asked.token_ids)
        told = (cold[place].tokens, ram[place].tokens, ssd[place].tokens)
        assert told == (expected, expected, expected), place
        assert cold[place].cache.cached_token_count == 0, place
        found = (ram[place].cache.ram_token_count, ssd[place].cache.ssd_token_count)
        assert found == (reused, reused), place
        assert len(set(expected)) > 2, f"{place}: the model says something"


def test_a_changed_pixel_and_another_picture_are_none_and_the_text_before_them_is(
    model: Model, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"max_output_tokens": OUTPUT_COUNT}
    pictures = [picture(1), picture(1, changed=True), picture(2)]
    alike = [model.asked([f"{TEXT}: ", each, TEXT]) for each in pictures]
    assert len({tuple(asked.token_ids) for asked in alike}) == 1, "only the pictures differ"
    start = alike[0].images[0].start_token_index
    with CacheServer(model.folder, tmp_path) as served:
        told = [served.ask(f"{n}", a.token_ids, images=a.images, **ask) for n, a in enumerate(alike)]
        unseen = served.ask("unseen", alike[0].token_ids, **ask)
    # After a restart the SSD knows them apart as well, and a match inside a block ends at the picture.
    with CacheServer(model.folder, tmp_path) as served:
        third = model.asked([f"{TEXT}: ", picture(3), TEXT])
        after = served.ask("third", third.token_ids, images=third.images, **ask)
        again = served.ask("again", alike[1].token_ids, images=alike[1].images, **ask)
    for answer in (*told[1:], unseen, after):
        # States are kept at checkpoints only, of which there is none before the picture.
        least = 0 if model.family is FAMILIES["lfm2_vl"] else start // BLOCK * BLOCK
        assert least <= answer.cache.cached_token_count <= start
    assert again.cache.cached_token_count == len(alike[1].token_ids) - 1
    assert again.tokens == told[1].tokens
    for asked, answer, each in zip(alike, told, pictures, strict=True):
        assert answer.tokens == model.expected([f"{TEXT}: ", each, TEXT], ids=asked.token_ids)
    assert len({tuple(answer.tokens) for answer in (*told, unseen)}) >= 3, "pictures change the text"


def test_a_text_that_goes_on_starts_behind_the_picture(model: Model, tmp_path: Path) -> None:
    parts: list[str | Image.Image] = [picture(1), f" {TEXT}"]
    with CacheServer(model.folder, tmp_path) as served:
        asked = model.asked(parts)
        first = served.ask("first", asked.token_ids, images=asked.images, max_output_tokens=OUTPUT_COUNT)
        longer = model.asked([*parts, " and then it was gone"])
        second = served.ask("more", longer.token_ids, images=longer.images, max_output_tokens=OUTPUT_COUNT)
        other = served.ask("other", longer.token_ids, images=longer.images, tenant=Tenant("other"))
    assert second.cache.cached_token_count >= len(asked.token_ids) - 1 > asked.images[0].end_token_index
    assert other.cache == CacheReport(limit=other.cache.limit), "another tenant's are none"
    expected = model.expected([*parts, " and then it was gone"], ids=longer.token_ids)
    assert second.tokens == expected and first.tokens != expected


def test_a_prompt_that_ends_with_a_picture_is_answered_from_the_cache_too(
    model: Model, tmp_path: Path
) -> None:
    """Its last token, which every hit runs again, is inside the picture."""
    asked = model.asked([f"{TEXT}: ", picture(1)])
    ids = asked.token_ids[: asked.images[0].end_token_index]
    ask: dict[str, Any] = {"max_output_tokens": OUTPUT_COUNT, "images": asked.images}
    with CacheServer(model.folder, tmp_path) as served:
        cold = served.ask("cold", ids, **ask)
        ram = served.ask("ram", ids, **ask)
    with CacheServer(model.folder, tmp_path) as served:
        ssd = served.ask("ssd", ids, **ask)
    assert ram.tokens == ssd.tokens == cold.tokens


@pytest.mark.parametrize("chunk", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_cuts_through_a_picture_and_company_change_nothing(model: Model, tmp_path: Path, chunk: int) -> None:
    asks = {place: model.asked(parts) for place, parts in PLACES.items()}
    with CacheServer(model.folder, None, chunk=chunk, is_enabled=False) as served:
        for place, asked in asks.items():
            served.submit(place, asked.token_ids, images=asked.images, max_output_tokens=OUTPUT_COUNT)
        told = {place: served.answer(place).tokens for place in asks}
    assert told == {place: model.expected_at(place, ids=asks[place].token_ids) for place in asks}


def test_a_tower_in_small_pieces_gives_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from icehouse_server.engine.runner.vision import mlx_vlm, slices

    asked = model.asked([picture(1)])
    [span] = asked.images
    ids = asked.token_ids[span.start_token_index : span.end_token_index]
    tensors = {tensor.name: array_of(tensor) for tensor in span.image.tensors}
    whole = mlx_vlm.read_model(model.folder, lazy=False)[1].begin(ids, tensors)
    for name in ("_CPU_WORK", "_GPU_WORK", "_LEAST_COUNT"):
        monkeypatch.setattr(slices, name, 1)
    cut = mlx_vlm.read_model(model.folder, lazy=False)[1].begin(ids, tensors)
    for kind in ("attention", "feed_forward", "linear"):
        counts = [sum(piece.kind == kind for piece in run.slices) for run in (whole, cut)]
        assert counts[1] > 2 * counts[0] > 0, f"{kind}: {counts}"
    assert mx.allclose(whole.vectors, cut.vectors, atol=1e-5).item()


def test_a_picture_that_is_seen_whole_is_another_one_than_mlx_vlm_reads(tmp_path: Path) -> None:
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load

    folder = tiny_vision_dir(tmp_path, "gemma3")
    reference, processor = load(str(folder))
    mark = FAMILIES["gemma3"].mark
    inputs = processor(images=[picture(1)], text=[f"{mark}{TEXT}"], add_special_tokens=False)
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    steps = generate_step(
        ids, reference, pixels, mx.ones(ids.shape), max_tokens=OUTPUT_COUNT, temperature=0.0
    )
    upstream = [int(token) for token, _ in steps][:OUTPUT_COUNT]
    asked: dict[str, Any] = {"count": OUTPUT_COUNT}
    listed = np.array(ids)[0].tolist()
    assert upstream == whole_images.generated(reference, listed, pixels, sees_whole=False, **asked)
    assert upstream != whole_images.generated(reference, listed, pixels, **asked)
