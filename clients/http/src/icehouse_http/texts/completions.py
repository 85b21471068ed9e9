"""Completions of texts: requests, and answers whole and as chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from icehouse_client import AsyncClient, Infill, Options, Prompt, Reply, StreamEvent
from icehouse_client.logprobs import logprobs_from
from icehouse_client.results import finish_reason_of

from icehouse_http.chat.answer import DONE, finish_reason, outputs_of, usage_of
from icehouse_http.errors import ApiError, Dialect
from icehouse_http.exchange import COMMENT, Asked, Frame
from icehouse_http.field_names import FieldNames
from icehouse_http.fields import INT32_MAX, Fields, is_list_of
from icehouse_http.logprobs import text_logprobs
from icehouse_http.sampling import openai_sampling_of, session_of, target_options
from icehouse_http.settings import Settings
from icehouse_http.upstream import Target

_DEFAULT_MAX_TOKENS = 16
"""As OpenAI's API has it."""
_MOST_COMPLETIONS = 128
_MOST_LOGPROBS = 20
_NAMES = {
    "prompt": "prompt",
    "prompt.adapter": "model",
    "completions": "n",
    "logprobs": "logprobs",
}


def asked_of(fields: Fields, target: Target, headers: Mapping[str, str], settings: Settings) -> Asked:
    """Return what a request asks for; raises ApiError that names the field that cannot be read."""
    options: Options = openai_sampling_of(fields, settings)
    options.update(target_options(target))
    options.update(session_of("", headers))
    options["max_output_tokens"] = fields.token_limit("max_tokens") or _DEFAULT_MAX_TOKENS
    if (count := fields.integer("n", least=1, most=_MOST_COMPLETIONS)) is not None and count > 1:
        options["completions"] = count
    if (top_count := fields.integer("logprobs", least=0, most=_MOST_LOGPROBS)) is not None:
        options["logprobs"] = top_count
        if fields.flag("echo"):
            raise fields.refusal("echo", "cannot be combined with logprobs")
    return Asked(_prompt_of(fields), options, fields.flag("stream"), FieldNames(others=_NAMES))


def _prompt_of(fields: Fields) -> Prompt:
    prompt, suffix = fields.raw("prompt"), fields.text("suffix")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str):
        return Infill(prompt, suffix) if suffix else prompt
    if not is_list_of(prompt, int) or not prompt:
        raise fields.refusal("prompt", "must be one string or one list of token ids")
    if suffix:
        raise fields.refusal("suffix", "needs a prompt that is a string")
    if not all(0 <= token_id <= INT32_MAX for token_id in prompt):
        raise fields.refusal("prompt", "has a number that is not a token id")
    return list(prompt)


async def echo_of(client: AsyncClient, fields: Fields, asked: Asked) -> str:
    """Return what the caller wants repeated before each output."""
    prompt: Any = asked.prompt
    if not fields.flag("echo"):
        return ""
    if isinstance(prompt, str):
        return prompt
    return prompt.prefix if isinstance(prompt, Infill) else await client.detokenize(prompt)


@dataclasses.dataclass(slots=True)
class TextAnswer:
    """Writes one answer of /v1/completions."""

    request_id: str
    options: Options
    echo: str
    tells_usage: bool
    head: dict[str, Any] = dataclasses.field(default_factory=dict)

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            {
                "index": index,
                "text": self.echo + output.text,
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": finish_reason(output.finish_reason),
            }
            for index, output in enumerate(outputs_of(reply))
        ]
        head = self._head(reply.model, reply.system_fingerprint)
        return {**head, "choices": choices, "usage": usage_of(reply)}

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive."""
        return COMMENT

    def feed(self, event: StreamEvent) -> Iterable[Frame]:
        """Return the chunks for something that happened."""
        match event.WhichOneof("event"):
            case "started":
                self.head = self._head(event.started.model, event.started.system_fingerprint)
                for index in range(self.options.get("completions", 1) if self.echo else 0):
                    yield self._chunk(index, self.echo)
            case "delta":
                delta = event.delta
                if delta.text or delta.logprobs:
                    logprobs = self._logprobs(logprobs_from(delta.logprobs))
                    yield self._chunk(delta.completion_index, delta.text, logprobs=logprobs)
            case "finished":
                reason = finish_reason(finish_reason_of(event.finished.finish_reason))
                yield self._chunk(event.finished.completion_index, "", reason=reason)

    def end(self, reply: Reply) -> Iterable[Frame]:
        """Return the cost, where it was asked for, and the end."""
        if self.tells_usage:
            yield Frame({**self.head, "choices": [], "usage": usage_of(reply)})
        yield DONE

    def fail(self, error: ApiError) -> Iterable[Frame]:
        """Return the error as the last event."""
        yield Frame(error.body(Dialect.OPENAI))

    def _head(self, model: str, fingerprint: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        return text_logprobs(entries) if "logprobs" in self.options else None

    def _chunk(self, index: int, text: str, *, logprobs: Any = None, reason: str | None = None) -> Frame:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return Frame({**self.head, "choices": [choice]})
