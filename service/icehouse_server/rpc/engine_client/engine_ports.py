"""Ports of the event loop: what it needs from the packages below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.response_format import Grammar, ResponseFormat
from icehouse_server.domain.stats import EngineStats
from icehouse_server.errors import IcehouseError

if TYPE_CHECKING:
    # The first is slow to import, the second needs an optional extra.
    from icehouse_server.text.tokenizer import Tokenizer
    from icehouse_server.vision.image_reader import ImageReader

StatsReply = Callable[[EngineStats, CacheStats | None], None]
CommandReply = Callable[[CacheAnswer | IcehouseError], None]


class EnginePort(Protocol):
    """The engine, as the event loop sees it: nothing here blocks, and all of it may be called from the loop's
    thread.

    For each submitted request, also a cancelled one, `Router.publish` gets exactly one last event (`Finished`
    or `Failed`).
    """

    @property
    def heartbeat_time(self) -> float:
        """`Clock.monotonic` at the inference loop's last turn."""

    @property
    def step_allowance_s(self) -> float:
        """How long a step may take before it looks stuck, derived from the steps measured so far."""

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        """Accept the request together with its siblings for the same prompt, all or none.

        Raises Overloaded, Unavailable, CannotFit or AlreadyExists if none is accepted.
        """

    def cancel(self, request_id: RequestId) -> None:
        """End the request within a step. An unknown or ended id is no error."""

    def request_stats(self, reply: StatsReply) -> None:
        """Call `reply` once, on the inference thread, with the counters between two steps."""

    def submit_command(self, command: CacheCommand, reply: CommandReply) -> None:
        """Call `reply` once, on any thread, with the command's own answer or with an error."""


class GrammarPort(Protocol):
    """Compiles response formats for the served model. Called from a few threads; may take seconds."""

    def stack_bytes(self, form_bytes: int) -> int:
        """Return the stack size that a thread needs for a format of this length: compiling is recursive."""

    def prepare(self) -> object:
        """Read the vocabulary if it has not been read."""

    def kept(self, form: ResponseFormat) -> Grammar | None:
        """Return a format's grammar if it is cached; does not block."""

    def compile(self, form: ResponseFormat) -> Grammar:
        """Return a format's grammar; raises InvalidRequest with the position of a mistake."""

    def close(self) -> None:
        """End its processes."""


class BlockFiles(Protocol):
    """The format of block files in an archive. Any thread."""

    def encode(self, block: HostBlock) -> Sequence[memoryview]:
        """Return the parts of a block's file, in the clear."""

    def decode(self, data: memoryview) -> HostBlock:
        """Return the verified block of a file, as views of `data`; raises ValueError if it is not a block."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model: its facts and its tokenizer."""

    info: ModelInfo
    tokenizer: Tokenizer
    images: ImageReader | None = None
    """None if the model reads only text."""
    block_files: BlockFiles | None = None
    """None without an SSD tier."""
