"""Model folder for a bench: random weights made on the spot, or any that `icehouse serve` takes."""

from __future__ import annotations

from pathlib import Path

from icehouse_server.bootstrap.model_source import locate_model
from icehouse_server.cli.terminal.build_progress import build_progress
from icehouse_server.config import ModelConfig

from bench.random_model import RandomModel, make_random_model

_RANDOM = {"random": RandomModel.LARGE, **{which.value: which for which in RandomModel}}
"""Names that `--model` takes besides folders; the first is the usual one."""


def model_path(model: str, scratch: Path) -> Path:
    """Return the folder of the model to measure; a random model is made first."""
    if model in _RANDOM:
        return make_random_model(scratch, which=_RANDOM[model])
    with build_progress() as on_progress:
        return locate_model(ModelConfig(model=model), on_progress=on_progress).path
