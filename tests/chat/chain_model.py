"""A model that writes what it is told to: each token decides the next one.

A real llama whose attention and feed-forward layers add nothing and whose output layer knows one successor
for each token. It runs through runner, caches and sampler like any other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.models import build, tiny_config
from tests.models.chat_templates import Family, write_family
from tests.models.folder import write_model
from tests.models.vocabulary import VOCABULARY_SIZE, tokenizer

_GAIN = 30.0
_SEED = 7


def chain_model_dir(folder: Path, family: Family, script: Sequence[str], *, first: str) -> Path:
    """Write a model folder that answers `first`, the last token of its prompts, with `script`.

    Texts of the script become tokens of their own, and each may appear once. Behind the script, and
    behind every other printable token, comes another printable one, for ever.
    """
    extra = tuple(text for text in script if text not in tokenizer().get_vocab())
    write_family(folder, family, extra_tokens=tuple(t for t in extra if t not in dict(family.tokens)))
    added = [text for text, _ in family.tokens] + [t for t in extra if t not in dict(family.tokens)]
    ids = tokenizer().get_vocab() | {text: VOCABULARY_SIZE + index for index, text in enumerate(added)}
    size = VOCABULARY_SIZE + len(added)
    successors = _babble()
    chain = [ids[first], *(ids[text] for text in script)]
    successors |= dict(itertools.pairwise(chain))
    successors.setdefault(chain[-1], min(successors))
    model = build("llama", vocab_size=size)
    model.update({"lm_head": {"weight": _heads(np.array(model.model.embed_tokens.weight), successors)}})
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    model.model.norm.weight = mx.ones_like(model.model.norm.weight)
    mx.eval(model.parameters())
    write_model(folder, model, tiny_config("llama", vocab_size=size))
    return folder


def _babble() -> dict[int, int]:
    """Return one long round through the printable tokens that are no special ones."""
    vocabulary = tokenizer().get_vocab()
    printable = [i for text, i in vocabulary.items() if text.isascii() and text.isalnum()]
    random.Random(_SEED).shuffle(printable)
    return dict(zip(printable, [*printable[1:], printable[0]], strict=True))


def _heads(embedding: np.ndarray, successors: dict[int, int]) -> mx.array:
    heads = np.zeros_like(embedding)
    for token, successor in successors.items():
        heads[successor] += _GAIN * embedding[token] / np.sum(embedding[token] ** 2)
    return mx.array(heads)
