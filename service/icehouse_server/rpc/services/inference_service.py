"""InferenceService: Generate, Stream, Tokenize, Detokenize, CacheStats."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from icehouse.v1 import cache_stats_pb2, completion_pb2, inference_service_pb2_grpc, tool_pb2, usage_pb2
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import inference_service_pb2 as messages

from icehouse_server.domain.call import Operation
from icehouse_server.domain.events import CacheReport, Finished
from icehouse_server.domain.ids import DEFAULT_TENANT
from icehouse_server.domain.request import SentImages
from icehouse_server.domain.sampling import SEED_RANGE
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.engine_client import answers
from icehouse_server.rpc.messages.field_checks import (
    check_adapter,
    completions_of,
    logprobs_of,
    max_output_tokens_of,
    max_reasoning_tokens_of,
    stop_of,
    stop_token_ids_of,
)
from icehouse_server.rpc.messages.options import bad_words_of, response_format_of, sampling_of, speculation_of
from icehouse_server.rpc.messages.proto_map import timestamp_proto, to_proto
from icehouse_server.rpc.messages.responses import cache_report_proto
from icehouse_server.rpc.services.generation import Service
from icehouse_server.rpc.services.prepared import Prepared
from icehouse_server.rpc.services.prompts import (
    TextPrompt,
    pieces,
    text_of,
    text_prompt_of,
    with_sent_images,
)

if TYPE_CHECKING:
    # This needs an optional extra.
    from icehouse_server.vision.image_reader import PromptImages


class InferenceService(Service, inference_service_pb2_grpc.InferenceServiceServicer):
    """Thin: each method reads the request, asks the layers below, and writes the answer."""

    async def Generate(  # type: ignore[override]
        self, request: messages.GenerateRequest, context: Context
    ) -> EncodedResponse:
        async with self._calls.call(context, _operation_of(request)) as call:
            prepared = await self.prepare(request, call)
            replies, total = prepared.new_replies(), ReplySum(completion_count=prepared.completion_count)
            caches = [CacheReport()] * prepared.completion_count
            async with self._generation.run(prepared.requests, call=call) as events:
                async for index, event in events:
                    for completion in prepared.completions_of(index):
                        total.add(replies.responses(completion, event))
                        answers.count_buffered(total.size_bytes)
                        if isinstance(event, Finished):
                            caches[completion] = event.usage.cache
            return total.response(
                [cache_report_proto(cache, prepared.notes) for cache in caches],
                lists_completions=request.completions > 0,
            )

    async def Stream(  # type: ignore[override]
        self, request: messages.GenerateRequest, context: Context
    ) -> None:
        timer = self._stall_timer()
        async with self._calls.call(context, _operation_of(request)) as call:
            if self._seats.are_several:
                async with timer.guard():
                    await self._generation.telling(
                        self._generation.use_for(request, call),
                        request.model,
                        call,
                        lambda loading: timer.write(context, messages.StreamResponse(loading_model=loading)),
                    )
            prepared = await self.prepare(request, call)
            replies = prepared.new_replies()
            running = self._generation.run(prepared.requests, call=call, on_stall=timer.expire)
            async with running as events, timer.guard():
                async for index, event in events:
                    for completion in prepared.completions_of(index):
                        for response in replies.responses(completion, event):
                            await timer.write(context, response)

    async def Tokenize(
        self, request: messages.TokenizeRequest, context: Context
    ) -> messages.TokenizeResponse:
        async with self._calls.call(context) as call:
            _, model = await self._generation.use(request.model, call)
            check_adapter(request.prompt.adapter, model.info, field="prompt.adapter")
            tenant = call.caller.tenant or DEFAULT_TENANT
            rules = self._generation.rules_of(tenant, request.prompt.adapter, model)
            check = functools.partial(text_prompt_of, request.prompt, model.info, rules=rules)

            def answer(prompt: TextPrompt, images: PromptImages | None) -> messages.TokenizeResponse:
                found = pieces(prompt, model, images)
                tokens = [messages.Token(id=token_id, piece=piece) for token_id, piece in found]
                return messages.TokenizeResponse(tokens=tokens, token_count=len(tokens))

            self._generation.charge(0, call=call)
            size_bytes = request.prompt.ByteSize()
            checked = await self._prompts.run(check, size_bytes=size_bytes)
            response = await self._prompts.run_with_images(checked, model, answer, size_bytes=size_bytes)
            self._generation.charge(response.token_count, call=call)
            call.prompt_token_count = response.token_count
            return response

    async def Detokenize(
        self, request: messages.DetokenizeRequest, context: Context
    ) -> messages.DetokenizeResponse:
        async with self._calls.call(context) as call:
            _, model = await self._generation.use(request.model, call)

            def answer() -> messages.DetokenizeResponse:
                return messages.DetokenizeResponse(text=text_of(request.token_ids, model))

            self._generation.charge(0, call=call)
            call.prompt_token_count = len(request.token_ids)
            response = await self._prompts.run(answer, size_bytes=request.ByteSize())
            self._generation.charge(call.prompt_token_count, call=call)
            return response

    async def CacheStats(
        self, request: messages.CacheStatsRequest, context: Context
    ) -> messages.CacheStatsResponse:
        async with self._calls.call(context) as call:
            _, cache = await self._seats.seat_of(request.model, call.caller).counters.ask()
            return messages.CacheStatsResponse(
                collect_time=timestamp_proto(self._clock.wall()),
                cache=None if cache is None else to_proto(cache, cache_stats_pb2.CacheStats),
            )

    async def prepare(
        self,
        request: messages.GenerateRequest,
        call: RpcCall,
        *,
        read_images: Callable[[], SentImages] | None = None,
    ) -> Prepared:
        """Return the request for the engine. What needs no tokenizer to be refused is refused first.

        `read_images` returns the images that the prompt's tokens stand for, if any, off the event loop.
        """
        model = await self._generation.use_for(request, call)
        whole = self._generation.request_of(request, model=model, call=call)
        max_output_tokens = max_output_tokens_of(request.max_output_tokens, self._config)
        sampling = sampling_of(
            request.sampling,
            stop_token_ids=stop_token_ids_of(request.stop_token_ids, model.info),
            generated_seed=self._draw_seed(),
            max_output_tokens=max_output_tokens,
            info=model.info,
        )
        wants_logprobs = request.HasField("logprobs")
        choice = request.tool_choice if request.HasField("tool_choice") else None
        form = response_format_of(request.response_format) if request.HasField("response_format") else None
        prompt = self._generation.unchecked(request.prompt, model, choice, tenant=whole.tenant, form=form)
        return await self._generation.prepare(
            dataclasses.replace(
                whole,
                max_output_tokens=max_output_tokens,
                sampling=sampling,
                stop=stop_of(request.stop, self._config),
                ends_session=request.ends_session,
                logprobs=logprobs_of(request.logprobs, model.info) if wants_logprobs else None,
                speculation=speculation_of(request.speculation) if request.HasField("speculation") else None,
            ),
            prompt if read_images is None else with_sent_images(prompt, read_images),
            model,
            call,
            bad_words=bad_words_of(request.sampling.bad_words),
            form=form,
            max_reasoning_tokens=(
                max_reasoning_tokens_of(request.max_reasoning_tokens, self._config)
                if request.HasField("max_reasoning_tokens")
                else None
            ),
            completion_count=completions_of(request.completions, self._config),
        )


def _operation_of(request: messages.GenerateRequest) -> Operation:
    return Operation.CHAT if request.prompt.HasField("chat") else Operation.TEXT_COMPLETION


_LENGTH_DELIMITED = 2
"""The wire type of nested messages."""


class ReplySum:
    """Generate's answer: the messages of a stream, added up by completion.

    Log probabilities are by far the largest part. They are kept encoded, which takes a quarter of the memory
    of messages. The answer is joined from bytes, so the event loop touches each byte once.
    """

    def __init__(self, *, completion_count: int) -> None:
        self._started = inference.Started()
        self._logprobs = bytearray()
        """Those of the prompt and of the first completion, encoded as fields of the answer."""
        self._outputs = [_CompletionSum() for _ in range(completion_count)]
        self.size_bytes = 0
        """The encoded size of everything added."""

    def add(self, responses: Iterable[inference.StreamResponse]) -> None:
        for response in responses:
            self.size_bytes += response.ByteSize()
            match response.WhichOneof("event"):
                case "started":
                    self._started = response.started
                case "prefill_progress":
                    logprobs = response.prefill_progress.prompt_logprobs
                    if logprobs:
                        self._logprobs += inference.GenerateResponse(
                            prompt_logprobs=logprobs
                        ).SerializeToString()
                case "delta":
                    self._add(response.delta)
                case "finished":
                    self._outputs[response.finished.completion_index].finished = response.finished

    def response(
        self, caches: Iterable[usage_pb2.CacheReport], *, lists_completions: bool
    ) -> EncodedResponse:
        """Return the GenerateResponse, after each `finished` was added; `caches` is what each completion
        reused."""
        completions = [
            output.completion(index, seed=(self._started.seed + index) % SEED_RANGE, cache=cache)
            for index, (output, cache) in enumerate(zip(self._outputs, caches, strict=True))
        ]
        # The answer itself holds the first completion, and its cache report replaces that of `started`.
        shared = _shared(inference.GenerateResponse, self._started, completions[0])
        answer = inference.GenerateResponse(**shared)
        parts = [answer.SerializeToString(), bytes(self._logprobs)]
        if lists_completions:
            for completion, output in zip(completions, self._outputs, strict=True):
                parts += _completion_field(completion.SerializeToString(), bytes(output.logprobs))
        return EncodedResponse(b"".join(parts))

    def _add(self, delta: inference.Delta) -> None:
        self._outputs[delta.completion_index].add(delta)
        if delta.logprobs and delta.completion_index == 0:
            self._logprobs += inference.GenerateResponse(logprobs=delta.logprobs).SerializeToString()


class _CompletionSum:
    """One completion."""

    def __init__(self) -> None:
        self.finished = inference.Finished()
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._token_ids: list[int] = []
        self.logprobs = bytearray()
        """Encoded as fields of a completion."""
        self._calls: dict[int, tool_pb2.ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}
        self._malformed: list[tool_pb2.MalformedToolCall] = []

    def add(self, delta: inference.Delta) -> None:
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs += completion_pb2.Completion(logprobs=delta.logprobs).SerializeToString()
        if delta.HasField("malformed_tool_call"):
            self._malformed.append(delta.malformed_tool_call)
        if delta.HasField("tool_call"):
            self._add_call(delta.tool_call)

    def completion(self, index: int, *, seed: int, cache: usage_pb2.CacheReport) -> completion_pb2.Completion:
        for call_index, call in self._calls.items():
            call.arguments_json = "".join(self._arguments[call_index])
        return completion_pb2.Completion(
            **_shared(completion_pb2.Completion, self.finished),
            index=index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            cache=cache,
            seed=seed,
            tool_calls=self._calls.values(),
            reasoning="".join(self._reasonings),
            malformed_tool_calls=self._malformed,
        )

    def _add_call(self, piece: tool_pb2.ToolCallDelta) -> None:
        if piece.withdrawn:
            del self._calls[piece.index]
            return
        if piece.index not in self._calls:
            self._calls[piece.index] = tool_pb2.ToolCall(id=piece.id, name=piece.name)
        self._calls[piece.index].repaired |= piece.repaired
        self._arguments.setdefault(piece.index, []).append(piece.arguments_json)


def _shared(kind: type[Message], *sources: Message) -> dict[str, Any]:
    """Return the fields set in the sources that `kind` has under the same names; later sources win."""
    names = kind.DESCRIPTOR.fields_by_name
    return {
        field.name: value for source in sources for field, value in source.ListFields() if field.name in names
    }


def _completion_field(*parts: bytes) -> tuple[bytes, ...]:
    """Return one encoded item of the answer's `completions`, made of these parts."""
    tag = inference.GenerateResponse.COMPLETIONS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
    return (_varint(tag), _varint(sum(len(part) for part in parts)), *parts)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
