"""Conversion of one family of models from GGUF to MLX: what no other family has in common with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from icehouse_server.demo.gguf_file import Array, Metadata
from icehouse_server.demo.tokenizer import Vocabulary

TOOL_CALLS_TEMPLATE = """\
{%- for call in message['tool_calls'] or [] -%}
{%- set tool_call = call['function'] -%}
{{- '\\n' if message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{{- (tool_call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
"""
"""The part of a chat template that writes a message's tool calls behind its content."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The four parts of a family's conversion."""

    model_config: Callable[[Metadata], dict[str, Any]]
    """Returns config.json for mlx-lm; raises ValueError for a file of another architecture."""
    convert_tensor: Callable[[str, Array, Metadata], tuple[str, Array]]
    """Takes the file's name and decoded values of a tensor and returns mlx-lm's; raises KeyError."""
    make_tokenizer: Callable[[Vocabulary], Tokenizer]
    chat_template: str
    """Jinja, as transformers renders it."""


def expect_architecture(metadata: Metadata, architecture: str) -> None:
    """Raise ValueError unless the file is of this architecture."""
    found = metadata["general.architecture"]
    if found != architecture:
        raise ValueError(f"architecture is {found!r}, not {architecture!r}")


def mlx_name(gguf_name: str, *, outer: Mapping[str, str], inner: Mapping[str, str]) -> str:
    """Return mlx-lm's name of a tensor: `outer` names whole ones, `inner` the parts of a layer.

    Raises KeyError for a tensor that the family does not have.
    """
    if gguf_name in outer:
        return outer[gguf_name]
    block, _, rest = gguf_name.removesuffix(".weight").partition(".")
    index, _, part = rest.partition(".")
    if block != "blk":
        raise KeyError(gguf_name)
    return f"model.layers.{int(index)}.{inner[part]}.weight"
