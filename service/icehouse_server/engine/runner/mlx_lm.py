"""Adapter to mlx-lm: everything taken from its non-public parts, with a contract test.

mlx-lm >= 0.32, < 0.33. Each function here says what it relies on; `tests/unit/engine/runner/test_mlx_lm.py`
fails when that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import (
    _get_classes,
    _tokenizer_defaults,
    load_adapters,
    load_model,
    load_tokenizer,
    maybe_set_recommended_wired_limit,
)
from transformers import AutoTokenizer

Classes = Callable[[dict[str, Any]], tuple[Any, Any]]
"""From config.json to the classes of a model and of its arguments."""


def knows(config: Mapping[str, Any]) -> bool:
    """Return whether the installed mlx-lm has a class for the model in config.json."""
    try:
        _get_classes(dict(config))
    except (ValueError, AttributeError, TypeError):  # no module of that name, or no model's; or no name
        return False
    return True


def read_model(
    path: Path,
    *,
    lazy: bool,
    trust_remote_code: bool,
    classes: Classes | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Load weights and config of an MLX model folder. Raises what mlx-lm raises."""
    model, config = load_model(
        path, lazy=lazy, get_model_classes=classes or _get_classes, trust_remote_code=trust_remote_code
    )
    return model, dict(config)


def bare_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """As mlx-lm finds them, for embedding models: some are published as the model's body alone, so that no
    weight's name begins with the body's."""
    model_class, args_class = _get_classes(config)

    def make(args: Any) -> Any:
        model = model_class(args)
        sanitize = getattr(model, "sanitize", lambda weights: weights)

        def with_names(weights: dict[str, Any]) -> dict[str, Any]:
            is_bare = hasattr(model, "model") and not any(name.startswith("model.") for name in weights)
            named = {f"model.{name}": w for name, w in weights.items()} if is_bare else weights
            return dict(sanitize(named))

        model.sanitize = with_names
        return model

    return make, args_class


def read_adapter(model: Any, path: str) -> Any:
    """Apply a LoRA adapter folder to a loaded model."""
    return load_adapters(model, path)


def read_tokenizer(path: Path, *, eos_token_ids: Any, trust_remote_code: bool) -> Any:
    """Load mlx-lm's TokenizerWrapper from a model folder.

    mlx-lm's own loader also makes a streaming detokenizer from the whole vocabulary. It is not used here, and
    took a third of the CPU time for a vocabulary of 262,144 tokens (2.9 s against 1.9 s on an x86 core,
    mlx-lm 0.32.2). That loader is called only if the chat template is a Python module of mlx-lm.
    """
    # Passed even if false: without it, transformers asks on the terminal, and a yes runs the code.
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    inner = AutoTokenizer.from_pretrained(path, **extra)
    if inner.init_kwargs.get("chat_template_type") or _tokenizer_defaults(path):
        return load_tokenizer(path, extra, eos_token_ids=eos_token_ids)  # type: ignore[no-untyped-call]
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    return TokenizerWrapper(inner, eos_token_ids=ids)


def wire_memory() -> None:
    """Let Metal keep the model's pages resident; does nothing on other devices."""
    maybe_set_recommended_wired_limit()
