"""Random Qwen2.5-VL of the vision bench, and its pictures: 256 tokens each, all different.

Made in another process (`python -m bench.vision_model FOLDER`), so that the bench itself computes nothing.
"""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.server_process import ROOT, child_environment

IMAGE_TOKEN_COUNT = 256
_KIND = "qwen2_5_vl"
_PATCH = 14
_SIDE = 448
"""Pixels: 32 patches, of which two by two are a token."""


def make_vision_model(parent: Path) -> Path:
    """Write the model below `parent` and return its folder."""
    command = [sys.executable, "-m", "bench.vision_model", str(parent)]
    subprocess.run(command, cwd=ROOT, env=child_environment(), check=True)
    return parent / _KIND


def picture(seed: int) -> bytes:
    """Return a PNG that is unique to the seed: a few large squares of colour."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def _write(parent: Path) -> None:
    from bench.random_model import never_emit_partial_characters
    from tests.fixtures.models.vision import FAMILIES, tiny_vision_dir

    family = FAMILIES[_KIND]

    def config() -> dict[str, Any]:
        small = family.config()
        tower = {
            **small["vision_config"],
            "depth": 8,
            "hidden_size": 256,
            "intermediate_size": 768,
            "out_hidden_size": 1024,
            "num_heads": 4,
            "patch_size": _PATCH,
            "spatial_patch_size": _PATCH,
            "window_size": 8 * _PATCH,
            "fullatt_block_indexes": [3, 7],
        }
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        rope = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
        return {**small, **sizes, **heads, **rope, "vision_config": tower}

    pixels = {"patch_size": _PATCH, "min_pixels": _SIDE**2, "max_pixels": _SIDE**2}
    larger = dataclasses.replace(family, config=config, processor={**family.processor, **pixels})
    folder = tiny_vision_dir(parent, _KIND, family=larger)
    never_emit_partial_characters(folder, head_name="language_model.lm_head.weight")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
