"""Recipe: how a model's folder says its hidden states become a vector or a score.

The format is sentence-transformers': modules.json names the steps, each with a folder of its own. A folder
without it gets sentence-transformers' default, the mean over all tokens. Anything unknown is refused by name,
since a vector made in another way would look as good and find the wrong texts.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from icehouse_server.domain.model import EmbeddingPrompt
from icehouse_server.engine.runner.encoders.config_values import size_of

_CLASSIFIER: Final = "ForSequenceClassification"


class Gather(enum.Enum):
    """Which hidden states make a vector; the values are sentence-transformers' names."""

    FIRST = "cls"
    LAST = "lasttoken"
    MEAN = "mean"


_FLAGS: Final = {
    "pooling_mode_cls_token": Gather.FIRST.value,
    "pooling_mode_lasttoken": Gather.LAST.value,
    "pooling_mode_mean_tokens": Gather.MEAN.value,
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of earlier releases; exactly one of them is set."""


@dataclasses.dataclass(frozen=True, slots=True)
class DenseStep:
    """A dense layer after the pooling."""

    path: Path
    input_size: int
    output_size: int
    has_bias: bool
    activation: str


@dataclasses.dataclass(frozen=True, slots=True)
class VectorRecipe:
    """How a folder's vectors are made."""

    gather: Gather | None
    """None if the folder does not say."""
    dense: tuple[DenseStep, ...] = ()
    token_limit: int | None = None
    """Texts are no longer than this, even if the model could take more."""
    prompts: tuple[EmbeddingPrompt, ...] = ()
    unknown_step: str = ""
    """The first unknown step. A reranker is served all the same, since steps do not make its score."""

    def check_steps(self) -> None:
        """Raise ValueError if an unknown step makes vectors."""
        if self.unknown_step:
            raise ValueError(f"modules.json has a step {self.unknown_step!r}, which is not supported")


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether a model scores texts. Raises ValueError if it sorts them into classes instead."""
    names = config.get("architectures") or ()
    if not any(str(name).endswith(_CLASSIFIER) for name in names):
        return False
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ValueError(
            f"it sorts texts into {count} classes; only models with a single score are supported"
        )
    return True


def recipe_of(folder: Path) -> VectorRecipe:
    """Read a folder's recipe. Raises ValueError for unknown pooling and for damaged files."""
    gather, dense, unknown = None, [], ""
    for step, path in _steps(folder):
        if step == "Pooling":
            gather = _gather_of(_object(path / "config.json"))
        elif step == "Dense":
            dense.append(_dense_of(path))
        elif step not in ("Transformer", "Normalize"):
            unknown = unknown or step
    limits = folder / "sentence_bert_config.json"
    limit = _object(limits).get("max_seq_length") if limits.exists() else None
    named = folder / "config_sentence_transformers.json"
    return VectorRecipe(
        unknown_step=unknown,
        gather=gather,
        dense=tuple(dense),
        token_limit=limit if isinstance(limit, int) and limit > 0 else None,
        prompts=_prompts_of(_object(named)) if named.exists() else (),
    )


def _steps(folder: Path) -> Sequence[tuple[str, Path]]:
    """Return the steps that modules.json names, each with its folder, in order."""
    file = folder / "modules.json"
    if not file.exists():
        return ()
    listed = json.loads(file.read_bytes())
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ValueError("modules.json does not hold a list of steps")
    steps = []
    for each in listed:
        name = str(each.get("path", ""))
        if name != Path(name).name:
            raise ValueError(f"modules.json has a step in {name!r}, which is not a folder beside it")
        steps.append((str(each.get("type", "")).rpartition(".")[2], folder / name))
    return steps


def _prompts_of(options: Mapping[str, Any]) -> tuple[EmbeddingPrompt, ...]:
    prompts, default = options.get("prompts") or {}, options.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(f"it has no prompt named {default!r}, its default_prompt_name")
    return tuple(EmbeddingPrompt(str(name), str(text), name == default) for name, text in prompts.items())


def _gather_of(options: Mapping[str, Any]) -> Gather:
    modes = options.get("pooling_mode") or [name for flag, name in _FLAGS.items() if options.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes)
    known = [mode.value for mode in Gather]
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"its pooling is {modes or None}; supported are {', '.join(known)}")
    if not options.get("include_prompt", True):
        raise ValueError("its pooling leaves the prompt out (include_prompt), which is not supported")
    return Gather(modes[0])


def _dense_of(path: Path) -> DenseStep:
    options = _object(path / "config.json")
    activation = str(options.get("activation_function", "tanh"))
    return DenseStep(
        path,
        size_of(options, "in_features"),
        size_of(options, "out_features"),
        has_bias=bool(options.get("bias", True)),
        activation=activation,
    )


def _object(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return found
