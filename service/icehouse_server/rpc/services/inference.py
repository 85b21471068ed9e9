"""InferenceService: Generate, Stream, Tokenize, Detokenize, CacheStats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc

from icehouse_server.domain.call import Operation
from icehouse_server.domain.events import CacheReport, Finished
from icehouse_server.domain.ids import DEFAULT_TENANT
from icehouse_server.domain.request import SentImages
from icehouse_server.rpc.calls.calls import Call, Context
from icehouse_server.rpc.calls.wire import Encoded
from icehouse_server.rpc.engine_client import answers
from icehouse_server.rpc.engine_client.ports import OpenImages
from icehouse_server.rpc.engine_client.stall_timer import StallTimer
from icehouse_server.rpc.messages.chat import check_no_tools
from icehouse_server.rpc.messages.response_format import response_format_of
from icehouse_server.rpc.messages.responses import cache_report_proto
from icehouse_server.rpc.messages.sampling import bad_words_of, sampling_of
from icehouse_server.rpc.messages.speculation import speculation_of
from icehouse_server.rpc.messages.validation import (
    check_model,
    completions_of,
    logprobs_of,
    max_output_tokens_of,
    max_reasoning_tokens_of,
    session_id_of,
    stop_of,
    stop_token_ids_of,
)
from icehouse_server.rpc.monitoring.stats_reader import StatsReader
from icehouse_server.rpc.services.parts import ServiceParts
from icehouse_server.rpc.services.prepared import Prepared
from icehouse_server.rpc.services.prompts import (
    Prompt,
    TextPrompt,
    Unread,
    infill_of,
    pieces,
    prompt_of,
    text_of,
    text_prompt_of,
    unchecked,
    with_sent_images,
)
from icehouse_server.rpc.services.reply_sum import ReplySum


class InferenceService(inference_service_pb2_grpc.InferenceServiceServicer):
    """Thin: each method reads the request, asks below, and writes the answer."""

    def __init__(self, parts: ServiceParts, *, stats: StatsReader) -> None:
        self._config = parts.config
        self._calls = parts.calls
        self._generation = parts.generation
        self._router = parts.router
        self._prompts = parts.prompts
        self._draw_seed = parts.draw_seed
        self._stats = stats

    async def Generate(  # type: ignore[override]
        self, request: messages.GenerateRequest, context: Context
    ) -> Encoded:
        """Answer once, with the complete output."""
        async with self._calls.call("Generate", context, _operation_of(request)) as call:
            prepared = await self.prepare(request, call)
            replies, total = prepared.new_replies(), ReplySum(completion_count=prepared.completion_count)
            caches = [CacheReport()] * prepared.completion_count
            async with self._generation.run(prepared.requests, call=call) as events:
                async for index, event in events:
                    for completion in prepared.told_by(index):
                        total.add(replies.responses(completion, event))
                        answers.keep(total.size_bytes)
                        if isinstance(event, Finished):
                            caches[completion] = event.usage.cache
            return total.response(
                [cache_report_proto(cache, prepared.notes) for cache in caches],
                lists_completions=request.completions > 0,
            )
        # `Calls` turns every error into a status and raises that.
        raise AssertionError("a call that answered nothing ended well")

    # Written with context.write, not as a generator: only so can a write that blocks be timed.
    async def Stream(  # type: ignore[override]
        self, request: messages.GenerateRequest, context: Context
    ) -> None:
        """Answer event by event."""
        timer = StallTimer(timeout_s=self._config.stall_timeout_s)
        async with self._calls.call("Stream", context, _operation_of(request)) as call:
            prepared = await self.prepare(request, call)
            replies = prepared.new_replies()
            running = self._generation.run(prepared.requests, call=call, on_stall=timer.expire)
            async with running as events, timer.guard():
                async for index, event in events:
                    for completion in prepared.told_by(index):
                        for response in replies.responses(completion, event):
                            await timer.write(context, response)

    async def Tokenize(
        self, request: messages.TokenizeRequest, context: Context
    ) -> messages.TokenizeResponse:
        """Answer with the tokens of a prompt."""
        async with self._calls.call("Tokenize", context) as call:
            model = self._router.require_model()
            check_model(request.model, model.info)
            kind = request.WhichOneof("prompt")
            normalizes = self._generation.normalizes(call.caller.tenant or DEFAULT_TENANT)

            def check() -> TextPrompt:
                if kind == "infill":
                    check_no_tools(request.tools, None)
                    return infill_of(request.infill)
                return text_prompt_of(request, kind, model.info, normalizes=normalizes)

            def answer(prompt: TextPrompt, images: OpenImages | None) -> messages.TokenizeResponse:
                found = pieces(prompt, model, images)
                tokens = [messages.Token(id=token_id, piece=piece) for token_id, piece in found]
                return messages.TokenizeResponse(tokens=tokens, token_count=len(tokens))

            self._generation.charge(0, call=call)
            size_bytes = request.ByteSize()
            checked = await self._prompts.run(check, size_bytes=size_bytes)
            response = await self._prompts.run_with_images(checked, model, answer, size_bytes=size_bytes)
            self._generation.charge(response.token_count, call=call)
            call.prompt_token_count = response.token_count
            return response

    async def Detokenize(
        self, request: messages.DetokenizeRequest, context: Context
    ) -> messages.DetokenizeResponse:
        """Answer with the text of tokens."""
        async with self._calls.call("Detokenize", context) as call:
            model = self._router.require_model()
            check_model(request.model, model.info)

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
        """Answer with the counters between two steps."""
        async with self._calls.call("CacheStats", context) as call:
            return await self._stats.read(call.caller)

    async def prepare(
        self,
        request: messages.GenerateRequest,
        call: Call,
        *,
        read_images: Callable[[], SentImages] | None = None,
    ) -> Prepared:
        """Return what the engine is asked; what needs no tokenizer is refused first: that costs nothing.

        `read_images` gives those that its tokens stand for, if any, off the event loop.
        """
        model = self._router.require_model()
        if request.session_id:
            call.session_id = session_id_of(request.session_id)
        whole = self._generation.request_of(request, policy=request.cache, model=model, call=call)
        normalizes = self._generation.normalizes(whole.tenant)
        max_output_tokens = max_output_tokens_of(request.max_output_tokens, self._config)
        sampling = sampling_of(
            request.sampling,
            stop_token_ids=stop_token_ids_of(request.stop_token_ids, model.info),
            generated_seed=self._draw_seed(),
            max_output_tokens=max_output_tokens,
            info=model.info,
        )
        wants_logprobs = request.HasField("logprobs")
        kind = request.WhichOneof("prompt")
        choice = request.tool_choice if request.HasField("tool_choice") else None

        def check() -> Prompt:
            if kind == "infill":
                check_no_tools(request.tools, choice)
                return infill_of(request.infill)
            return prompt_of(request, kind, model.info, choice, normalizes=normalizes)

        prompt = unchecked(request, check)
        unread = Unread(
            model=model,
            request=dataclasses.replace(
                whole,
                max_output_tokens=max_output_tokens,
                sampling=sampling,
                stop=stop_of(request.stop, self._config),
                logprobs=logprobs_of(request.logprobs, model.info) if wants_logprobs else None,
                speculation=speculation_of(request.speculation) if request.HasField("speculation") else None,
            ),
            bad_words=bad_words_of(request.sampling.bad_words),
            form=response_format_of(request.response_format) if request.HasField("response_format") else None,
            max_reasoning_tokens=(
                max_reasoning_tokens_of(request.max_reasoning_tokens, self._config)
                if request.HasField("max_reasoning_tokens")
                else None
            ),
            completion_count=completions_of(request.completions, self._config),
            prompt=prompt if read_images is None else with_sent_images(prompt, read_images),
        )
        return await self._generation.prepare(unread, call=call)


def _operation_of(request: messages.GenerateRequest) -> Operation:
    return Operation.CHAT if request.WhichOneof("prompt") == "chat" else Operation.TEXT_COMPLETION
