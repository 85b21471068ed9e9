"""Image processor of one model: decoded images to tensors and to the text that stands for them in a prompt.

The tensors are made by the model's own processor, as transformers has it for Pillow and numpy: torch is not
needed. What identifies an image is made of them: two files with equal pixels are one image. Any thread.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.request import ImageInput, ImageSpan, image_digest
from icehouse_server.errors import InvalidRequest, ModelError, Reason

_DTYPES: Final = {"float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_CONFIGS: Final = ("preprocessor_config.json", "processor_config.json")
_DEFAULT_TILE_TOKENS: Final = 169
"""`image_seq_len` of SmolVLM's processor where the model's folder does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image for the model, and the text that takes the place of its mark in the prompt."""

    image: ImageInput
    text: str


class ImageProcessor:
    """Of SmolVLM and Idefics3: an image is cut into tiles, each so many tokens, and shown once more whole."""

    mark = "<image>"
    """What the chat template writes where an image stands, and what its tokens are spelled."""

    def __init__(self, path: Path) -> None:
        """`path` is the model's folder. Raises ModelError when it has no processor to read."""
        try:
            self._inner: Any = AutoImageProcessor.from_pretrained(path, backend="pil")  # type: ignore[no-untyped-call]
            configs = [_read(path / name) for name in _CONFIGS]
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ModelError(
                Reason.MODEL_INVALID, f"the image processor in {path} cannot be loaded: {_words(error)}"
            ) from error
        found = configs[1].get("image_seq_len", _DEFAULT_TILE_TOKENS)
        self._tile_token_count = int(found)
        versions = [importlib.metadata.version(name) for name in ("transformers", "pillow")]
        facts = [type(self._inner).__name__, self._inner.to_dict(), configs, versions]
        self.fingerprint = json.dumps(facts, sort_keys=True, default=str).encode()
        """Everything that decides what becomes of the pixels."""

    def prepare(self, image: Image.Image) -> PreparedImage:
        """Return the tensors and the text of one image."""
        made = self._inner([[image]], return_row_col_info=True)
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        # The mask comes as integers of eight bytes, and is more than the pixels then.
        mask = np.asarray(made["pixel_attention_mask"], dtype=bool)
        tensors = (_host("pixel_attention_mask", mask), _host("pixel_values", made["pixel_values"]))
        digest = image_digest(self.fingerprint, tensors)
        tile_count = mask.shape[1]
        found = ImageInput(digest, tensors, feature_count=tile_count * self._tile_token_count)
        return PreparedImage(found, self._text(rows, columns))

    def _text(self, row_count: int, column_count: int) -> str:
        """As mlx-vlm and transformers write it: the tiles row by row, then the whole."""
        border, tokens = "<fake_token_around_image>", self.mark * self._tile_token_count
        text = ""
        for row in range(1, row_count + 1):
            tiles = [f"{border}<row_{row}_col_{n}>{tokens}" for n in range(1, column_count + 1)]
            text += "".join(tiles) + "\n"
        return f"{text}{chr(10) if text else ''}{border}<global-img>{tokens}{border}"


def spans_of(
    token_ids: Sequence[int], images: Sequence[ImageInput], *, image_token_id: int
) -> tuple[ImageSpan, ...]:
    """Return where images stand in a prompt, each from its first token that the tower makes to its last.

    Raises InvalidRequest when the prompt has more or fewer such tokens: somebody wrote them as text.
    """
    places = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    wanted = sum(image.feature_count for image in images)
    if len(places) != wanted:
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            f"the prompt has {len(places)} image tokens and its images have {wanted}; texts must not contain "
            "the model's own marks of images",
            field="chat",
            metadata={"image_tokens": len(places), "expected_image_tokens": wanted},
        )
    spans, first = [], 0
    for image in images:
        last = first + image.feature_count
        spans.append(ImageSpan(int(places[first]), int(places[last - 1]) + 1, image))
        first = last
    return tuple(spans)


def _host(name: str, array: Any) -> HostTensor:
    whole = np.ascontiguousarray(array)
    data = memoryview(cast(Any, whole.reshape(-1).view(np.uint8)))
    return HostTensor(name, _DTYPES[whole.dtype.name], whole.shape, data)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
