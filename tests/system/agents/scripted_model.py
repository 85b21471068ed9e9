"""A model that leads an agent program through a task: what it writes is scripted, the rest is real.

A llama of one small layer with a tokenizer trained on this project's pages, so that a program's prompt has
about as many tokens as with a real model. Rendering, cache, reading of replies and usage are the server's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fixtures.models import build, tiny_config
from tests.fixtures.models.chat_templates import THINKING
from tests.fixtures.models.folder import write_model
from tests.fixtures.models.vocabulary import EOS_ID, SPECIAL_TOKENS, TURN_END_ID

CONTEXT_TOKENS = 131_072
_VOCABULARY_SIZE = 4096
_PAGES = Path(__file__).parents[3] / "docs"
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the program's own tools."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the model answers to a prompt whose last known phrase is this one."""

    phrase: str
    said: str = ""
    calls: Sequence[Call] = ()
    thought: str = ""

    @property
    def reply(self) -> str:
        """The answer as the model's family writes it, which is Qwen3's and Hermes's way."""
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        calls = "".join(
            f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
            for call in self.calls
        )
        return f"{thought}{self.said}{calls}<|im_end|>"


def write_scripted_model(folder: Path) -> Path:
    """Write the model into a folder and return it."""
    folder.mkdir(parents=True)
    size = _write_tokenizer(folder)
    config = tiny_config("llama", vocab_size=size, eos_token_id=[EOS_ID, TURN_END_ID], **_SHAPE)
    write_model(folder, build("llama", vocab_size=size, **_SHAPE), config)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Write tokenizer and chat template, and return how many tokens there are."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train([str(page) for page in sorted(_PAGES.rglob("*.md"))], trainer)
    built.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in THINKING.tokens]
    )
    built.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": THINKING.template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return built.get_vocab_size()
