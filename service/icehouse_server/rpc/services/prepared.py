"""Prepared request: what the engine is asked, and how its output is handed out.

Several prompts of one call as requests that the engine takes in together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.domain.request import GenerationRequest, part_of
from icehouse_server.rpc.engine_client.ports import ServedModel
from icehouse_server.rpc.messages.reply import Replies, Reply, call_id_maker
from icehouse_server.rpc.messages.responses import NO_NOTES, ReplyFacts, ReportNotes
from icehouse_server.text.replies.reply_splitter import ReplySplitter


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation and its prompt."""

    conversation: Conversation
    rendered: RenderedChat


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """Ready to run. `chat` is None where the prompt was plain text or tokens: then nothing is told apart."""

    model: ServedModel
    request: GenerationRequest
    chat: RenderedConversation | None
    create_time: float
    """`Clock.wall` when the request reached the edge."""
    completion_count: int = 1
    notes: ReportNotes = NO_NOTES
    """What its cache reports say beside what the engine tells."""

    @property
    def completions(self) -> tuple[GenerationRequest, ...]:
        """A request for each completion."""
        return tuple(self.request.completion(index) for index in range(self.completion_count))

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """What the engine is asked: one request a completion, or one for all where they are all alike."""
        return self.completions[:1] if self._is_greedy else self.completions

    def told_by(self, index: int) -> Sequence[int]:
        """Return the completions that the events of `requests[index]` are of."""
        return range(self.completion_count) if self._is_greedy else (index,)

    @property
    def _is_greedy(self) -> bool:
        return self.request.sampling.temperature == 0.0

    def new_replies(self) -> Replies:
        """Return what turns the events of one run into messages."""
        return Replies([self._new_reply(request) for request in self.completions])

    def _new_reply(self, request: GenerationRequest) -> Reply:
        info = self.model.info
        facts = ReplyFacts(
            request_id=request.name,
            model_id=info.model_id,
            seed=request.sampling.seed,
            create_time=self.create_time,
            system_fingerprint=info.system_fingerprint(request.adapter),
            max_output_token_count=min(
                request.max_output_tokens, info.context_token_limit - len(request.prompt_token_ids)
            ),
            unenforced=() if request.grammar is None else request.grammar.unenforced,
        )
        return Reply(
            facts=facts,
            splitter=self._new_splitter(request),
            piece=self.model.tokenizer.piece,
            notes=self.notes,
        )

    def _new_splitter(self, request: GenerationRequest) -> ReplySplitter | None:
        if self.chat is None:
            return None
        return self.model.tokenizer.reply_splitter(
            self.chat.conversation,
            self.chat.rendered,
            make_call_id=call_id_maker(request.name, request.prompt_token_ids),
        )


def requests_together(
    whole: GenerationRequest, prompts: Sequence[tuple[int, ...]]
) -> tuple[list[int], list[GenerationRequest]]:
    """Return a request for each prompt, like `whole` in everything else, and which prompt each one is of.

    The engine judges requests that come together by the first, so that is the longest.
    """
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    requests = [
        dataclasses.replace(
            whole, request_id=part_of(whole.request_id, rank), prompt_token_ids=prompts[index]
        )
        for rank, index in enumerate(order)
    ]
    return order, requests
