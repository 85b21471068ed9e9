"""Settings of the model and of what is loaded beside it."""

from __future__ import annotations

import dataclasses

from icehouse_server.config.named_paths import NamedPath
from icehouse_server.config.setting import Kind, setting


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served, and how it is loaded."""

    model: str = setting(
        "demo",
        'What to serve: "demo", "demo-gemma", a folder with an MLX model, or a hub id such as org/name.',
    )
    model_name: str | None = setting(
        None, "The model name that clients use; by default the folder's name or the hub id."
    )
    dtype: str = setting(
        "auto",
        "Type of the weights in memory; auto keeps the model's own, or uses float32 on a CPU with OpenBLAS.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    adapter_path: str | None = setting(
        None, "Folder with a LoRA adapter to apply to every request.", kind=Kind.PATH
    )
    adapters: tuple[NamedPath, ...] = setting(
        (), "LoRA adapters that requests may choose: name=folder,name=folder, or a table in the file."
    )
    draft_model: str | None = setting(
        None, "A smaller model of the same vocabulary that guesses tokens for requests with speculation."
    )
    context_token_limit: int | None = setting(
        None,
        "Maximum tokens of prompt and output together; by default the model's own context length.",
        minimum=2,
    )
    trust_remote_code: bool = setting(False, "Let the tokenizer run Python code that comes with the model.")
