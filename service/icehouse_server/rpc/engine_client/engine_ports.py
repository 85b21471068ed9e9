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
    """The engine, as the event loop sees it: nothing here blocks, everything is safe from its thread.

    Each submitted request is answered through `Router.publish` by exactly one last event
    (`Finished` or `Failed`), a cancelled one too.
    """

    @property
    def heartbeat_time(self) -> float:
        """`Clock.monotonic` at the inference loop's last turn."""

    @property
    def step_allowance_s(self) -> float:
        """How long a step may take here before it looks stuck, from the steps measured so far."""

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        """Take the request in, and its siblings for the same prompt with it or not at all.

        Raises Overloaded, Unavailable, CannotFit or AlreadyExists if it does not.
        """

    def cancel(self, request_id: RequestId) -> None:
        """End the request within a step. An unknown or ended id is no error."""

    def request_stats(self, reply: StatsReply) -> None:
        """Call `reply` once, on the inference thread, with the counters between two steps."""

    def submit_command(self, command: CacheCommand, reply: CommandReply) -> None:
        """Call `reply` once, on any thread, with the command's own answer or with an error."""


class GrammarPort(Protocol):
    """Compiles response formats for the served model. Called in a few threads; may take seconds."""

    def stack_bytes(self, form_bytes: int) -> int:
        """Return the stack that a thread needs for a format of this length: compiling is recursive."""

    def prepare(self) -> object:
        """Read the vocabulary, unless it has been read."""

    def kept(self, form: ResponseFormat) -> Grammar | None:
        """Return the cached grammar of a format, at once."""

    def compile(self, form: ResponseFormat) -> Grammar:
        """Return a format's grammar; raises InvalidRequest with the position of a mistake."""

    def close(self) -> None:
        """End its processes."""


class BlockFiles(Protocol):
    """The format of block files in an archive. Any thread."""

    def encode(self, block: HostBlock) -> Sequence[memoryview]:
        """Return the parts of a block's file, in the clear."""

    def decode(self, data: memoryview) -> HostBlock:
        """Return the block of a file, verified, as views of `data`; raises ValueError for what is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model: its facts and its tokenizer."""

    info: ModelInfo
    tokenizer: Tokenizer
    images: ImageReader | None = None
    """None where the model reads text alone."""
    block_files: BlockFiles | None = None
    """None without an SSD tier."""
