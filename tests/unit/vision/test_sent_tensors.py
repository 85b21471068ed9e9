"""Images that somebody else has prepared: our own processor's are taken as its own, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icehouse_server.domain.request import ImageSpan
from icehouse_server.engine.runner import model_loader
from icehouse_server.errors import InvalidRequest, Reason

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.vision.decoder import ImageLimits  # noqa: E402
from icehouse_server.vision.image_reader import ImageReader, spans_of  # noqa: E402
from icehouse_server.vision.processor import open_processor  # noqa: E402

from tests.fixtures.models.vision import FAMILIES, tiny_vision_dir  # noqa: E402
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE  # noqa: E402
from tests.fixtures.sent_images import PIXELS, Array, arrays_of, places_of_spans, sent_images  # noqa: E402

IMAGE_ID = VOCABULARY_SIZE
LIMITS = ImageLimits(image_count=2, size_bytes=1 << 20, pixel_count=100_000, prepared_bytes=1 << 20)
SIZES = [(60, 40), (24, 33)]


@dataclasses.dataclass
class Prompt:
    """Two images in a text as our own parts make it, and what a gateway would send of them."""

    reader: ImageReader
    token_ids: list[int]
    spans: tuple[ImageSpan, ...]
    arrays: dict[str, Array]
    places: list[range]
    token_id: int | None = None

    @classmethod
    def of(cls, folder: Path, kind: str, *, limits: ImageLimits = LIMITS) -> Prompt:
        family = FAMILIES[kind]
        processor = open_processor(folder, family.config()["model_type"])
        tokenizer = model_loader.load_tokenizer(model_loader.ModelSource(path=folder, model_id="tiny"))
        prepared = [processor.prepare(noise(*size, seed=n)) for n, size in enumerate(SIZES)]
        text = "what is it "
        for each in prepared:
            text += f"{family.opening}{each.text}{family.closing} and this "
        ids = tokenizer.spell(text)
        spans = spans_of(ids, [each.image for each in prepared], image_token_id=IMAGE_ID)
        reader = ImageReader(processor, limits, image_token_id=IMAGE_ID)
        arrays = arrays_of([each.image for each in prepared])
        return cls(reader, ids, spans, arrays, places_of_spans(spans))

    def placed(self) -> tuple[ImageSpan, ...]:
        sent = sent_images(self.arrays, self.places, token_id=self.token_id)
        return self.reader.place(self.token_ids, sent)

    def refusal(self) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            self.placed()
        assert caught.value.reason is Reason.IMAGE_INVALID
        assert (
            caught.value.message.startswith(f"{caught.value.field} ") or "ends with" in caught.value.message
        )
        return caught.value


def noise(width: int, height: int, *, seed: int = 0) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_vision_dir(tmp_path_factory.mktemp("models"), kind)
        return made[kind]

    return folder


@pytest.fixture
def prompt(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Prompt:
    kind = getattr(request, "param", "qwen2_5_vl")
    return Prompt.of(folders(kind), kind)


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_our_own_tensors_are_our_own_images(prompt: Prompt) -> None:
    prompt.token_id = IMAGE_ID
    placed = prompt.placed()
    assert placed == prompt.spans, "digest, grid, tensors and places"
    assert len({span.image.digest for span in placed}) == 2


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_a_place_may_have_the_text_around_its_image_too(prompt: Prompt) -> None:
    prompt.places = [range(place.start - 1, place.stop + 1) for place in prompt.places]
    assert prompt.placed() == prompt.spans


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_one_number_changed_is_another_image_of_the_same_tokens(prompt: Prompt) -> None:
    prompt.arrays[PIXELS].reshape(-1)[0] += 1e-3
    placed = prompt.placed()
    assert [a.image.digest == b.image.digest for a, b in zip(placed, prompt.spans, strict=True)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 256.0, -1e30])
def test_numbers_that_no_processor_makes_are_refused(prompt: Prompt, value: float) -> None:
    prompt.arrays[PIXELS].reshape(-1)[-1] = value
    error = prompt.refusal()
    assert error.field == f"mm.{PIXELS}" and "not finite, or is beyond 255" in error.message


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_pixels_of_another_type_are_refused(prompt: Prompt, dtype: Any) -> None:
    prompt.arrays[PIXELS] = prompt.arrays[PIXELS].astype(dtype)
    assert "this model takes F32" in prompt.refusal().message


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_pixels_of_another_shape_are_refused(prompt: Prompt) -> None:
    pixels = prompt.arrays[PIXELS]
    for other in (pixels[None], pixels[..., :-1], pixels[:0], pixels[:, :-1], np.concatenate([pixels] * 2)):
        prompt.arrays[PIXELS] = other
        assert prompt.refusal().field in (f"mm.{PIXELS}", "mm.spatial_shapes", "mm.places[0]")


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_what_comes_besides_is_refused_by_name(prompt: Prompt) -> None:
    prompt.arrays["second_per_grid_ts"] = np.zeros(2, np.float32)
    error = prompt.refusal()
    assert error.field == "mm.second_per_grid_ts" and PIXELS in error.message


@pytest.mark.parametrize("prompt", FAMILIES, indirect=True)
def test_more_or_fewer_tokens_than_the_tensors_make_are_refused(prompt: Prompt) -> None:
    token_ids = prompt.token_ids
    first = prompt.spans[0].start_token_index
    for wrong in (
        [*token_ids[:first], IMAGE_ID, *token_ids[first:]],
        [*token_ids[:first], *token_ids[first + 1 :]],
    ):
        shift = len(wrong) - len(token_ids)
        start, stop = prompt.places[0].start, prompt.places[0].stop + shift
        second = prompt.spans[1]
        prompt.token_ids = wrong
        prompt.places = [
            range(start, stop),
            range(second.start_token_index + shift, second.end_token_index + shift),
        ]
        error = prompt.refusal()
        assert error.field == "mm.places[0]" and "image tokens" in error.message
        prompt.places = places_of_spans(prompt.spans)


def test_an_image_whose_tokens_have_text_among_them_is_refused(prompt: Prompt) -> None:
    middle = prompt.spans[0].start_token_index + 2
    prompt.token_ids[middle] = 1
    prompt.token_ids[prompt.spans[0].end_token_index] = IMAGE_ID
    start, stop = prompt.places[0].start, prompt.places[0].stop + 1
    prompt.places[0] = range(start, stop)
    count = prompt.spans[0].image.feature_count
    assert prompt.refusal().message == (
        f"mm.places[0] has {count} image tokens in 2 runs; an image of such tensors has {count} image tokens"
    )


@pytest.mark.parametrize("prompt", ["smolvlm", "pixtral"], indirect=True)
def test_much_text_within_an_image_is_refused(prompt: Prompt) -> None:
    first = prompt.spans[0].start_token_index
    gap = next(n for n in range(first, len(prompt.token_ids)) if prompt.token_ids[n] != IMAGE_ID)
    prompt.token_ids[gap:gap] = [1] * 40
    shifted = range(prompt.places[1].start + 40, prompt.places[1].stop + 40)
    prompt.places = [range(first, prompt.places[0].stop + 40), shifted]
    assert "tokens of text between two of the image" in prompt.refusal().message


def test_image_tokens_that_belong_to_none_are_refused(prompt: Prompt) -> None:
    prompt.token_ids[0] = IMAGE_ID
    count = sum(len(place) for place in prompt.places)
    error = prompt.refusal()
    assert (
        error.field == "mm.places"
        and f"{count} image tokens of the {count + 1} in the prompt" in error.message
    )


def test_a_place_without_an_image_token_is_refused(prompt: Prompt) -> None:
    prompt.places[0] = range(1)
    assert prompt.refusal().message == f"mm.places[0] has no image token ({IMAGE_ID}) from 0 to 0"


def test_another_image_token_than_the_model_s_is_refused(prompt: Prompt) -> None:
    prompt.token_id = IMAGE_ID + 1
    error = prompt.refusal()
    assert error.field == "mm.token_id" and f"the image token of this model is {IMAGE_ID}" in error.message


def test_too_many_images_too_many_bytes_and_too_many_pixels_are_refused(
    folders: Callable[[str], Path],
) -> None:
    refusals = {
        "image_count": ("mm.places", "has 2 images; the limit is 1"),
        "prepared_bytes": (f"mm.{PIXELS}", "the limit for a request's images is 1;"),
        "pixel_count": (f"mm.{PIXELS}", "the limit is 1; scale it down"),
    }
    for limit, (field, words) in refusals.items():
        for kind in FAMILIES if limit == "pixel_count" else ["qwen2_5_vl"]:
            prompt = Prompt.of(folders(kind), kind, limits=dataclasses.replace(LIMITS, **{limit: 1}))
            if kind == "gemma3" and limit == "pixel_count":
                assert prompt.placed() == prompt.spans, "its own size, whatever was scaled"
                continue
            error = prompt.refusal()
            assert (error.field, words in error.message) == (field, True), error.message


GRIDS: dict[str, Any] = {
    "two frames": ([2, 5, 8], "one frame"),
    "no rows": ([1, 0, 16], "one frame"),
    "odd": ([1, 5, 32], "multiples of 2"),
    "negative": ([1, -10, -16], "not from 0 to"),
    "endless": ([1, 2**40, 2**40], "not from 0 to"),
    "large": ([1, 2**30, 2**30], "the limit is 100000"),
}


@pytest.mark.parametrize("case", GRIDS)
@pytest.mark.parametrize("prompt", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_a_grid_that_no_image_has_is_refused(prompt: Prompt, case: str) -> None:
    grid, words = GRIDS[case]
    prompt.arrays["image_grid_thw"][0] = grid
    error = prompt.refusal()
    assert error.field in ("mm.image_grid_thw", f"mm.{PIXELS}") and words in error.message


def test_a_grid_is_needed_and_is_that_of_the_patches(prompt: Prompt) -> None:
    grids = prompt.arrays["image_grid_thw"]
    prompt.arrays["patches_per_image"] = grids.prod(axis=1)
    assert prompt.placed() == prompt.spans, "what gateways send beside"
    prompt.arrays["patches_per_image"] = grids.prod(axis=1)[::-1].copy()
    assert prompt.refusal().field == "mm.patches_per_image"
    del prompt.arrays["patches_per_image"]
    prompt.arrays["image_grid_thw"] = grids[:, [0, 2, 1]]
    assert prompt.placed() != prompt.spans, "another shape of the same patches is another image"
    prompt.arrays["image_grid_thw"] = grids[::-1].copy()
    assert prompt.refusal().field == "mm.places[0]"
    prompt.arrays["image_grid_thw"] = grids.astype(np.float32)
    assert "hold integers" in prompt.refusal().message
    del prompt.arrays["image_grid_thw"]
    assert (
        prompt.refusal().message
        == f"mm.{PIXELS} comes without image_grid_thw, which this model's images need"
    )


def test_numbers_of_32_bits_are_those_of_64(prompt: Prompt) -> None:
    prompt.arrays["image_grid_thw"] = prompt.arrays["image_grid_thw"].astype(np.uint32)
    assert prompt.placed() == prompt.spans


@pytest.mark.parametrize("prompt", ["smolvlm", "lfm2_vl"], indirect=True)
def test_a_mask_is_what_it_has_to_be_or_left_out(prompt: Prompt) -> None:
    mask = prompt.arrays.pop("pixel_attention_mask")
    assert prompt.placed() == prompt.spans
    mask[0, 0] = 0
    prompt.arrays["pixel_attention_mask"] = mask
    assert prompt.refusal().field == "mm.pixel_attention_mask"
    prompt.arrays["pixel_attention_mask"] = mask.astype(np.float32)
    assert "hold integers" in prompt.refusal().message


@pytest.mark.parametrize("prompt", ["smolvlm", "idefics3"], indirect=True)
def test_a_tile_of_zeros_is_refused_for_the_model_s_code_drops_it(prompt: Prompt) -> None:
    for nothing in (0.0, -0.0, 1e-40):
        prompt.arrays[PIXELS][1, 2] = nothing
        error = prompt.refusal()
        assert error.field == f"mm.{PIXELS}" and "a tile of zeros" in error.message


@pytest.mark.parametrize("prompt", ["pixtral", "mistral3"], indirect=True)
def test_sizes_lie_within_the_tensor_and_the_tower(prompt: Prompt) -> None:
    sizes = prompt.arrays["image_sizes"]
    for wrong in ([sizes[0, 0] + 1000, sizes[0, 1]], [0, sizes[0, 1]], [sizes[0, 0] - 1, sizes[0, 1]]):
        prompt.arrays["image_sizes"] = np.array([wrong, sizes[1]])
        error = prompt.refusal()
        assert error.field == f"mm.{PIXELS}" and "sides must be multiples of" in error.message
    del prompt.arrays["image_sizes"]
    assert "an image of such tensors" in prompt.refusal().message, "each is as large as the tensor then"


@pytest.mark.parametrize("prompt", ["lfm2_vl"], indirect=True)
def test_views_have_as_many_patches_as_there_are(prompt: Prompt) -> None:
    shapes = prompt.arrays["spatial_shapes"].copy()
    for wrong, words in (
        ([0, 4], "not 1 to"),
        ([400, 400], "not 1 to"),
        ([3, 3], "not multiples of 2"),
    ):
        prompt.arrays["spatial_shapes"] = shapes.copy()
        prompt.arrays["spatial_shapes"][0] = wrong
        error = prompt.refusal()
        assert error.field == "mm.spatial_shapes" and words in error.message


@pytest.mark.parametrize("prompt", ["gemma3"], indirect=True)
def test_a_prompt_that_ends_in_an_image_that_is_seen_whole_is_refused(prompt: Prompt) -> None:
    prompt.token_ids = prompt.token_ids[: prompt.spans[1].end_token_index]
    error = prompt.refusal()
    assert error.field == "mm.places" and "text must follow it" in error.message
