"""From keyword arguments to request messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import model_service_pb2, prompt_pb2, server_service_pb2

from icehouse_client.affinity import PromptRequest
from icehouse_client.cache import CacheOptions, cache_policy
from icehouse_client.chat import Infill, Message, PromptForm, chat_proto, tool_protos
from icehouse_client.conversation import Conversation
from icehouse_client.formats import ResponseFormat
from icehouse_client.message_dicts import Turn, messages_of
from icehouse_client.options import refuse_one_text, refuse_unknown
from icehouse_client.sampling import SamplingOptions, sampling_proto
from icehouse_client.speculation import Speculation
from icehouse_client.texts import names_bad_texts
from icehouse_client.tool_dicts import GivenTool, ToolChoice, choice_proto, tools_of

OnProgress = Callable[[model_service_pb2.LoadingModel], None]
"""Is told how far a model is that is being loaded."""

DEFAULT_TIMEOUT_S = 120.0
"""The deadline of a call that names none. Every call has one unless `timeout_s` is None."""

DEFAULT_COMMAND_TIMEOUT_S = 3600.0
"""The deadline of Warm, Evict, EvictAll, Verify, Export and Import that name none: a large disk takes its
time."""

Prompt = str | Sequence[Turn] | Sequence[int] | Infill
"""Text, a conversation, token ids, or two texts with a gap between them."""


class PromptOptions(CacheOptions, total=False):
    """What may be said beside a prompt, whatever is done with it. Left out: the server's default."""

    model: str
    adapter: str
    tools: Sequence[GivenTool]
    template_arguments: Mapping[str, Any]
    continue_final_message: bool
    prompt_form: PromptForm
    """Of a conversation; "stable" keeps earlier replies as they were generated."""
    timeout_s: float | None


class Options(SamplingOptions, PromptOptions, total=False):
    """What may be said about a request to generate."""

    max_output_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    """Tokens that end the output, beside the model's own."""
    completions: int
    """Outputs of the one prompt; with temperature 0 they are all alike."""
    logprobs: int
    """Tells log probabilities, and of so many likeliest tokens beside each one; 0 is none beside."""
    prompt_logprobs: bool
    """Tells those of the prompt's tokens too."""
    logprob_token_ids: Sequence[int]
    """Tells those of these tokens too, in every place."""
    request_id: str
    session_id: str
    """The conversation that this is a turn of, for gateways, logs and traces."""
    parent_session_id: str
    """The conversation that started this one: a subagent's."""
    ends_session: bool
    """This is its last turn: the server then evicts first what only this conversation has used."""
    priority: int
    tool_choice: ToolChoice
    allowed_tools: Sequence[GivenTool]
    """Those of `tools` that may be called; left out: all. The prompt is the same, and so are its blocks."""
    parallel_tool_calls: bool
    """False holds an output to one call."""
    response_format: ResponseFormat
    max_reasoning_tokens: int
    """Most tokens that the model thinks with before it answers; 0 closes its reasoning at once."""
    speculation: Speculation


@names_bad_texts
def generate_request(prompt: Prompt, options: Options) -> inference.GenerateRequest:
    """Return the message of Generate and Stream; raises TypeError for an unknown option or kind of prompt."""
    refuse_unknown(options, Options)
    refuse_one_text(options, ("stop", "bad_words"))
    request = inference.GenerateRequest(
        request_id=options.get("request_id", ""),
        session_id=options.get("session_id", ""),
        parent_session_id=options.get("parent_session_id", ""),
        ends_session=options.get("ends_session", False),
        max_output_tokens=options.get("max_output_tokens", 0),
        sampling=sampling_proto(options),
        completions=options.get("completions", 0),
        stop=options.get("stop", ()),
        stop_token_ids=options.get("stop_token_ids", ()),
        priority=options.get("priority", 0),
        cache=cache_policy(options),
    )
    if "logprobs" in options or options.get("prompt_logprobs") or "logprob_token_ids" in options:
        request.logprobs.top_count = options.get("logprobs", 0)
        request.logprobs.prompt = options.get("prompt_logprobs", False)
        request.logprobs.token_ids.extend(options.get("logprob_token_ids", ()))
        # Without a field set the message would be absent.
        request.logprobs.SetInParent()
    if "response_format" in options:
        form: object = options["response_format"]
        if not isinstance(form, ResponseFormat):
            kind = type(form).__name__
            raise TypeError(f"response_format is what `icehouse_client.formats` makes, not {kind}")
        request.response_format.CopyFrom(form)
    if "max_reasoning_tokens" in options:
        request.max_reasoning_tokens = options["max_reasoning_tokens"]
    if "speculation" in options:
        request.speculation.CopyFrom(options["speculation"])
    if "tool_choice" in options:
        request.tool_choice.CopyFrom(choice_proto(options["tool_choice"]))
    if "allowed_tools" in options:
        request.tool_choice.allowed.extend(
            tool.name for tool in tools_of(options["allowed_tools"], "allowed_tools")
        )
    if "parallel_tool_calls" in options:
        request.tool_choice.parallel_tool_calls = options["parallel_tool_calls"]
    set_prompt(request, prompt, options)
    return request


def set_prompt(request: PromptRequest, prompt: Prompt, options: PromptOptions) -> None:
    """Fill in the model and the prompt; raises TypeError for no known kind."""
    request.model = options.get("model", "")
    request.prompt.CopyFrom(_prompt_proto(prompt, options))


def _prompt_proto(prompt: Prompt, options: PromptOptions) -> prompt_pb2.Prompt:
    proto = prompt_pb2.Prompt(
        adapter=options.get("adapter", ""),
        tools=tool_protos(tools_of(options.get("tools", _own_tools(prompt)))),
    )
    if isinstance(prompt, Infill):
        proto.infill.CopyFrom(prompt_pb2.InfillPrompt(prefix=prompt.prefix, suffix=prompt.suffix))
    elif isinstance(prompt, str):
        proto.text = prompt
    elif _is_chat(prompt):
        proto.chat.CopyFrom(
            chat_proto(
                messages_of(prompt),
                template_arguments=options.get("template_arguments"),
                continue_final_message=options.get("continue_final_message", False),
                prompt_form=options.get("prompt_form", "default"),
            )
        )
    else:
        proto.tokens.CopyFrom(prompt_pb2.TokenPrompt(ids=_token_ids(prompt)))
    return proto


@names_bad_texts
def tokenize_request(
    prompt: str | Sequence[Turn] | Infill, *, model: str, tools: Sequence[GivenTool] = ()
) -> inference.TokenizeRequest:
    """Return the message of Tokenize."""
    options: PromptOptions = {"tools": tools} if tools else {}
    return inference.TokenizeRequest(model=model, prompt=_prompt_proto(prompt, options))


def watch_request(interval_s: float | None) -> server_service_pb2.WatchStatsRequest:
    """Return the message of WatchStats; None is the server's interval."""
    request = server_service_pb2.WatchStatsRequest()
    if interval_s is not None:
        request.interval.FromNanoseconds(round(interval_s * 1e9))
    return request


def timeout_of(options: PromptOptions, *, default_s: float | None) -> float | None:
    """Return the call's deadline in seconds, None for none."""
    return options.get("timeout_s", default_s)


def _own_tools(prompt: Prompt) -> Sequence[GivenTool]:
    return prompt.tools if isinstance(prompt, Conversation) else ()


def _is_chat(prompt: Sequence[Turn] | Sequence[int]) -> TypeGuard[Sequence[Turn]]:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Message | Mapping)


def _token_ids(prompt: Sequence[Turn] | Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt is a str, Messages or token ids, not {type(prompt).__name__}")
    token_ids = []
    for token_id in prompt:
        if not isinstance(token_id, int):
            raise TypeError(f"a prompt is a str, Messages or token ids, not {type(token_id).__name__}")
        token_ids.append(token_id)
    return token_ids
