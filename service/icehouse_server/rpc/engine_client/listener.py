"""Listener: what an engine says, handed to the router; called on the inference thread."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo, ReplyFormatInfo
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.engine_client.engine_ports import BlockFiles, ServedModel
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from icehouse_server.vision.image_reader import ImageReader

_log = logging.getLogger("icehouse.boot")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineListener:
    """Passes the engine's events to the router, and the model together with what its callers need of it."""

    router: Router
    tokenizer: Tokenizer
    images: ImageReader | None
    block_files: BlockFiles | None

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        self.router.publish(events)

    def model_loaded(self, info: ModelInfo) -> None:
        if info.reply_format is not None:
            _log_replies(info.reply_format)
        self.router.model_loaded(ServedModel(info, self.tokenizer, self.images, self.block_files))

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        self.router.state_changed(state, error)


def _log_replies(format: ReplyFormatInfo) -> None:
    """Log how chat replies will be parsed, and markers that nothing parses."""
    facts = {"calls": format.calls or "none", "reasoning": format.reasoning_start or "none"}
    _log.info("reply_format_found", extra={**facts, "evidence": "; ".join(format.evidence) or "none"})
    if format.unread_markers:
        _log.warning("reply_markers_unread", extra={"markers": " ".join(format.unread_markers)})
