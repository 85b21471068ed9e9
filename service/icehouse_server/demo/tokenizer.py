"""Tokenizer files of a demo model, and the vocabulary that a GGUF file carries."""

from __future__ import annotations

import dataclasses
import enum
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from icehouse_server.demo.gguf_file import Metadata


class PieceKind(enum.IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer. `pieces` and `kinds` are indexed by token id."""

    pieces: Sequence[str]
    kinds: Sequence[int]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    merges: Sequence[str] = ()
    """Pairs with a space between them, in rank order; empty where the file has none."""


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the vocabulary of a file."""
    return Vocabulary(
        pieces=metadata["tokenizer.ggml.tokens"],
        kinds=metadata["tokenizer.ggml.token_type"],
        bos_id=int(metadata["tokenizer.ggml.bos_token_id"]),
        eos_id=int(metadata["tokenizer.ggml.eos_token_id"]),
        unknown_id=int(metadata["tokenizer.ggml.unknown_token_id"]),
        padding_id=int(metadata["tokenizer.ggml.padding_token_id"]),
        merges=metadata.get("tokenizer.ggml.merges", ()),
    )


def write_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.pieces[vocabulary.bos_id],
        "eos_token": vocabulary.pieces[vocabulary.eos_id],
        "unk_token": vocabulary.pieces[vocabulary.unknown_id],
        "pad_token": vocabulary.pieces[vocabulary.padding_id],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def renew_template(folder: Path, template: str) -> None:
    """Write the chat template where it is missing or another one. It is no reason to build a model anew."""
    file = folder / "chat_template.jinja"
    if not file.exists() or file.read_text(encoding="utf-8") != template:
        # In a folder of its own: another server that starts now may be doing the same.
        with tempfile.TemporaryDirectory(dir=folder) as name:
            fresh = Path(name) / file.name
            fresh.write_text(template, encoding="utf-8")
            fresh.replace(file)
