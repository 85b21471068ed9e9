"""Ports of the event loop: what it needs from the rooms below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.chat import Conversation, ImageSource, ImageTexts, PromptChange, RenderedChat
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import GenerationRequest, ImageSpan, SentImages
from icehouse_server.domain.response_format import Grammar, ResponseFormat
from icehouse_server.domain.stats import EngineStats
from icehouse_server.errors import IcehouseError
from icehouse_server.text.infill import InfillTokens
from icehouse_server.text.reasoning import ReplyReasoning
from icehouse_server.text.replies.reply_splitter import ReplySplitter

StatsReply = Callable[[EngineStats, CacheStats | None], None]
CommandReply = Callable[[CacheAnswer | IcehouseError], None]


class EnginePort(Protocol):
    """The engine, as the event loop sees it: nothing here blocks, everything is safe from its thread.

    Each submitted request is answered through `Router.publish` by exactly one last event
    (`Finished` or `Failed`), a cancelled one too.
    """

    @property
    def heartbeat_time(self) -> float:
        """`Clock.monotonic` at the inference loop's last turn."""
        ...

    @property
    def step_allowance_s(self) -> float:
        """How long a step may take here before it looks stuck, from the steps measured so far."""
        ...

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        """Take the request in, and its siblings for the same prompt with it or not at all.

        Raises Overloaded, Unavailable, CannotFit or AlreadyExists if it does not.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """End the request within a step. An unknown or ended id is no error."""
        ...

    def request_stats(self, reply: StatsReply) -> None:
        """Call `reply` once, on the inference thread, with the counters between two steps."""
        ...

    def submit_command(self, command: CacheCommand, reply: CommandReply) -> None:
        """Call `reply` once, on any thread, with the command's own answer or with an error."""
        ...


class TokenizerPort(Protocol):
    """A tokenizer that several threads may use at once."""

    @property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token stands for, or more. May take a tenth of a second."""
        ...

    def normalized(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[PromptChange, ...]]:
        """Return a rendered prompt without what is volatile, and what was changed."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text, the model's start token included if it wants one."""
        ...

    def render_chat(self, conversation: Conversation) -> RenderedChat:
        """Return the prompt of a conversation; raises InvalidRequest when the template refuses."""
        ...

    def render_infill(self, *, prefix: str, suffix: str) -> InfillTokens:
        """Return the prompt of a gap between two texts; raises InvalidRequest for a model that fills none."""
        ...

    def reply_splitter(
        self, conversation: Conversation, rendered: RenderedChat, *, make_call_id: Callable[[int], str]
    ) -> ReplySplitter | None:
        """Return what splits the reply into its parts; None if it is plain text."""
        ...

    def reply_reasoning(self, conversation: Conversation, rendered: RenderedChat) -> ReplyReasoning | None:
        """Return how the reply reasons; None if the model does not mark its reasoning."""
        ...

    def hides_markers(self, conversation: Conversation) -> bool:
        """Whether the engine hides the markers that the splitter needs, unless told to show them."""
        ...

    def spell(self, text: str) -> list[int]:
        """Return the tokens of a piece of text by itself, without a start token."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones, bytes that are no UTF-8 as U+FFFD."""
        ...

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included but those that begin, end or pad a text."""
        ...

    def piece(self, token_id: int) -> str:
        """Return one token's own spelling."""
        ...


class ImagePort(Protocol):
    """Reads images for the served model. Any thread; an image takes tens of milliseconds."""

    def open(self, sources: Sequence[ImageSource]) -> OpenImagesPort:
        """Read the headers of a prompt's images; raises InvalidRequest, which names the one at fault."""
        ...

    def place(self, token_ids: Sequence[int], sent: SentImages) -> tuple[ImageSpan, ...]:
        """Return images that the caller has prepared, in a prompt; raises InvalidRequest."""
        ...


class OpenImagesPort(Protocol):
    """All images of a prompt, decoded and prepared one after the other, in order."""

    @property
    def pixel_bytes(self) -> Sequence[int]:
        """The memory that decoding each of them takes, by its header."""
        ...

    def read_next(self) -> int:
        """Decode and prepare the next one and return its prepared size in bytes; raises InvalidRequest."""
        ...

    @property
    def texts(self) -> ImageTexts:
        """What stands for each of them in the prompt."""
        ...

    def spans(self, token_ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Return where they are in a prompt's tokens; raises InvalidRequest if a text has markers."""
        ...


class GrammarPort(Protocol):
    """Compiles response formats for the served model. Called in a few threads; may take seconds."""

    def stack_bytes(self, form_bytes: int) -> int:
        """Return the stack that a thread needs for a format of this length: compiling is recursive."""
        ...

    def prepare(self) -> None:
        """Read the vocabulary, unless it has been read."""
        ...

    def kept(self, form: ResponseFormat) -> Grammar | None:
        """Return the cached grammar of a format, at once."""
        ...

    def compile(self, form: ResponseFormat) -> Grammar:
        """Return a format's grammar; raises InvalidRequest with the place of a mistake."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model: its facts and its tokenizer."""

    info: ModelInfo
    tokenizer: TokenizerPort
    images: ImagePort | None = None
    """None where the model reads text alone."""
