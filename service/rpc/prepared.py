"""A request that has been read: what the engine is asked, and how its output is told."""

from __future__ import annotations

import dataclasses

from service.domain.chat import Conversation, RenderedChat
from service.domain.request import GenerationRequest
from service.rpc.call_ids import call_id_maker
from service.rpc.ports import ServedModel, SplitterPort
from service.rpc.reply import Replies, Reply


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
    completion_count: int = 1

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """What the engine is asked, one request a completion."""
        return tuple(self.request.completion(index) for index in range(self.completion_count))

    def new_replies(self) -> Replies:
        """Return what turns the events of one run into messages."""
        return Replies([self._new_reply(request) for request in self.requests])

    def _new_reply(self, request: GenerationRequest) -> Reply:
        return Reply(
            request_id=request.request_id,
            model_id=self.model.info.model_id,
            seed=request.sampling.seed,
            splitter=self._new_splitter(request),
            piece=self.model.tokenizer.piece,
        )

    def _new_splitter(self, request: GenerationRequest) -> SplitterPort | None:
        if self.chat is None:
            return None
        return self.model.tokenizer.reply_splitter(
            self.chat.conversation,
            self.chat.rendered,
            make_call_id=call_id_maker(request.request_id, request.prompt_token_ids),
        )
