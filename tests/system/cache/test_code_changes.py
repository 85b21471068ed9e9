"""Blocks end with the code that computed them: mlx-lm is edited where it is installed, and put back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.code_run import PROMPTS, answers

SCALE = "self.scale = head_dim**-0.5"
WHOLE = [len(prompt) - 1 for prompt in PROMPTS]
NOTHING = [0] * len(PROMPTS)

pytestmark = pytest.mark.timeout(600)


class Installed:
    """A copy of mlx-lm, to be edited, and a tiny model that its llama reads."""

    def __init__(self, place: Path) -> None:
        self.packages = place / "packages"
        shutil.copytree(
            Path(mlx_lm.__file__).parent,
            self.packages / "mlx_lm",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        self._model = tiny_model_dir(place, "llama")
        self._directory = place / "blocks"

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.packages / "mlx_lm" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has moved"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def release(self, version: str) -> None:
        """Make it another release of mlx-lm, with no other change."""
        (self.packages / "mlx_lm" / "_version.py").write_text(f'__version__ = "{version}"\n')
        facts = self.packages / f"mlx_lm-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlx-lm\nVersion: {version}\n")

    def serve(self, *, directory: Path | None = None) -> dict[str, Any]:
        return answers(self.packages, self._model, directory or self._directory)


def test_blocks_end_with_the_code_that_computed_them_and_with_no_other(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    old = installed.serve()
    assert old["ssd_tokens"] == NOTHING and old["changed_code"] == []

    # A number is no code, and neither is code that the model does not run.
    installed.release("99.0")
    installed.edit(
        "models/gemma3_text.py", "class Model(nn.Module):", "class Model(nn.Module):\n    edited = 1\n"
    )
    warm = installed.serve()
    assert (warm["ssd_tokens"], warm["tokens"], warm["changed_code"]) == (WHOLE, old["tokens"], [])

    installed.edit("models/llama.py", SCALE, f"{SCALE} * 1.7")
    new = installed.serve()
    assert new["ssd_tokens"] == NOTHING, "KV of the old code was read"
    assert new["changed_code"] == ["mlx_lm.models.llama"]
    assert new["tokens"] == installed.serve(directory=tmp_path / "other blocks")["tokens"]
    assert all(a != b for a, b in zip(new["tokens"], old["tokens"], strict=True)), "the edit does nothing"

    installed.edit("models/llama.py", f"{SCALE} * 1.7", SCALE)
    back = installed.serve()
    assert (back["ssd_tokens"], back["tokens"], back["changed_code"]) == (WHOLE, old["tokens"], [])
