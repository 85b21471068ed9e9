"""Sampling and other options that several of the protocols name alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from icehouse_client import Options

from icehouse_http.fields import INT32_MAX, Fields
from icehouse_http.settings import Settings
from icehouse_http.upstream import NAME, Target

_LEAST_TOP_P = 1e-9
"""What stands for a `top_p` of 0, which is the server's word for none: the likeliest token alone."""

_SESSION_HEADERS = (
    "session-id",
    "session_id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-opencode-session",
)
"""Of Codex, of Claude Code, of OpenCode, and those that several use."""

THINKING_SWITCH = "enable_thinking"
"""The variable of many chat templates that switches reasoning off."""
EFFORT_VARIABLE = "reasoning_effort"
"""That of gpt-oss and others, which know three words for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """What a caller's word for how much to think becomes."""

    template_word: str = ""
    limit: int | None = None
    """Tokens; None is as many as the model likes."""


EFFORTS: Mapping[str, Effort] = {
    "none": Effort(limit=0),
    "minimal": Effort("low", limit=512),
    "low": Effort("low", limit=2048),
    "medium": Effort("medium"),
    "high": Effort("high"),
    "xhigh": Effort("high"),
    "max": Effort("high"),
}
"""The words of OpenAI and Anthropic. Not every template reads them, so the lower ones are limits, too."""


def sampling_of(fields: Fields, settings: Settings) -> Options:
    """Return how tokens are drawn, by the names that OpenAI, Anthropic and vLLM share."""
    options: Options = {}
    temperature = fields.number("temperature")
    if temperature is None:
        temperature = settings.temperature
    if temperature is not None:
        options["temperature"] = temperature
    if (top_p := fields.number("top_p")) is not None:
        options["top_p"] = max(top_p, _LEAST_TOP_P)
    if (min_p := fields.number("min_p")) is not None:
        options["min_p"] = min_p
    if (top_k := fields.integer("top_k", least=-1, most=INT32_MAX)) is not None:
        options["top_k"] = max(top_k, 0)
    return options


def openai_sampling_of(fields: Fields, settings: Settings) -> Options:
    """Return `sampling_of` and what only OpenAI's chat and completions have."""
    options = sampling_of(fields, settings)
    if (seed := fields.integer("seed", least=-(1 << 63), most=(1 << 64) - 1)) is not None:
        options["seed"] = seed % (1 << 64)
    if (presence := fields.number("presence_penalty")) is not None:
        options["presence_penalty"] = presence
    if (frequency := fields.number("frequency_penalty")) is not None:
        options["frequency_penalty"] = frequency
    if (repetition := fields.number("repetition_penalty")) is not None:
        options["repetition_penalty"] = repetition
    if bias := _logit_bias(fields):
        options["logit_bias"] = bias
    if stop := fields.texts("stop"):
        options["stop"] = stop
    return options


def _logit_bias(fields: Fields) -> dict[int, float]:
    entries = fields.object("logit_bias")
    bias: dict[int, float] = {}
    for key in fields.mapping("logit_bias") or {}:
        assert entries is not None, "it has a key"
        if not (key.isascii() and key.isdigit() and int(key) <= INT32_MAX):
            raise fields.refusal("logit_bias", f"has the key {key[:20]!r}, which is not a token id")
        bias[int(key)] = entries.number(key) or 0.0
    return bias


def target_options(target: Target) -> Options:
    """Return who answers."""
    options: Options = {"model": target.model.id}
    if target.adapter:
        options["adapter"] = target.adapter
    return options


def form_options(settings: Settings) -> Options:
    """Return how a conversation becomes a prompt."""
    return {"prompt_form": "exact" if settings.exact_prompts else "stable"}


def session_of(key: str, headers: Mapping[str, str]) -> Options:
    """Return the conversation that the caller names; one that cannot be a session's name is passed over."""
    for name in (key, *(headers.get(header, "") for header in _SESSION_HEADERS)):
        if NAME.fullmatch(name):
            return {"session_id": name}
    return {}


def reasoning_options(
    target: Target, *, limit: int | None, template_arguments: Mapping[str, Any] | None = None
) -> Options:
    """Return how much the model may think: None is as much as it likes, 0 not at all."""
    arguments = dict(template_arguments or {})
    options: Options = {}
    if limit == 0:
        arguments.setdefault(THINKING_SWITCH, False)
    if limit is not None and target.ends_reasoning:
        options["max_reasoning_tokens"] = min(limit, INT32_MAX)
    if arguments:
        options["template_arguments"] = arguments
    return options


def effort_of(fields: Fields, name: str) -> str:
    """Return a word of `EFFORTS`, or nothing where the field is not there."""
    return fields.one_of(name, *EFFORTS, default="") if fields.text(name) else ""


def effort_options(
    target: Target,
    effort: str,
    *,
    limit: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> Options:
    """Return what an effort asks for, as far as no limit of tokens or template argument says otherwise."""
    arguments = dict(template_arguments or {})
    if effort:
        known = EFFORTS[effort]
        limit = known.limit if limit is None else limit
        if known.template_word:
            arguments.setdefault(EFFORT_VARIABLE, known.template_word)
    return reasoning_options(target, limit=limit, template_arguments=arguments)
