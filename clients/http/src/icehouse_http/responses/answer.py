"""Answers of responses, whole and as events in the order that Codex and OpenAI's own clients read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from icehouse_client import Reply, StreamEvent, ToolCall
from icehouse_client.results import finish_reason_of

from icehouse_http.chat.answer import cache_details_of
from icehouse_http.errors import ApiError
from icehouse_http.exchange import Frame
from icehouse_http.held import HeldCalls, HeldSpace
from icehouse_http.responses.functions import Functions
from icehouse_http.responses.items import CUT, Item, begun, begun_call, finished, items_of, part_of

_TEXTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
"""What the events of an item's text are called."""


class ResponseAnswer:
    """Writes one answer of /v1/responses. `keep` is told the reply and its items once it is complete."""

    def __init__(
        self,
        request_id: str,
        told: Mapping[str, Any],
        functions: Functions,
        *,
        seals: bool,
        keep: Callable[[Reply, Sequence[Item]], None],
    ) -> None:
        self._facts = {"id": request_id, "object": "response", "created_at": int(time.time()), **told}
        self._functions = functions
        self._seals = seals
        self._keep = keep
        self._held = HeldCalls()
        self._space = HeldSpace()
        self._items: list[Item] = []
        self._item: Item | None = None
        self._texts: list[str] = []
        self._event_count = 0

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""
        self._items = items_of(reply, self._functions, seals=self._seals)
        self._keep(reply, self._items)
        return self._done(reply)

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive: an event, since Codex counts no comments."""
        return b"".join(frame.encode() for frame in self._in_progress())

    def feed(self, event: StreamEvent) -> Iterable[Frame]:
        """Return the events for something that happened."""
        match event.WhichOneof("event"):
            case "started":
                self._facts["model"] = event.started.model
                yield from self._in_progress()
            case "delta":
                delta = event.delta
                if delta.HasField("tool_call"):
                    yield from self._calls(self._held.add(delta.tool_call))
                if delta.reasoning:
                    yield from self._say("reasoning", delta.reasoning)
                if delta.text:
                    yield from self._calls(self._held.flush())
                    yield from self._say("message", self._space.add(delta.text))
            case "finished":
                yield from self._calls(self._held.flush())
                yield from self._say("message", self._space.flush())
                yield from self._close(is_cut=finish_reason_of(event.finished.finish_reason) in CUT)

    def end(self, reply: Reply) -> Iterable[Frame]:
        """Return the whole response as the last event."""
        self._keep(reply, self._items)
        response = self._done(reply)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Iterable[Frame]:
        """Return the failed response as the last event."""
        told = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response=self._response("failed", error=told))

    def _event(self, kind: str, **fields: Any) -> Frame:
        self._event_count += 1
        return Frame({"type": kind, "sequence_number": self._event_count - 1, **fields}, kind)

    def _in_progress(self) -> Iterable[Frame]:
        """Return the event that it goes on, behind the one that must be the first of all."""
        kinds = ("response.created", "response.in_progress")
        for kind in kinds[bool(self._event_count) :]:
            yield self._event(kind, response=self._response("in_progress"))

    def _response(self, status: str, **changes: Any) -> dict[str, Any]:
        unset = dict.fromkeys(("error", "incomplete_details", "usage"))
        return {**unset, **self._facts, "status": status, "output": list(self._items), **changes}

    def _done(self, reply: Reply) -> dict[str, Any]:
        usage = {
            "input_tokens": reply.usage.prompt_tokens,
            "input_tokens_details": cache_details_of(reply),
            "output_tokens": reply.usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.usage.reasoning_tokens},
            "total_tokens": reply.usage.prompt_tokens + reply.usage.output_tokens,
        }
        changes: dict[str, Any] = {"model": reply.model, "usage": usage}
        if reply.finish_reason in CUT:
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=details, **changes)
        return self._response("completed", **changes)

    def _say(self, kind: str, text: str) -> Iterable[Frame]:
        """Write more of an item's text, if any, and begin the item where another kind is open or none."""
        if not text:
            return
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            self._item = begun(kind)
            yield self._event("response.output_item.added", output_index=len(self._items), item=self._item)
            yield self._part("added", part_of(kind, ""))
        self._texts.append(text)
        yield self._of_text("delta", delta=text)

    def _close(self, *, is_cut: bool = False) -> Iterable[Frame]:
        """Finish the item that is open."""
        if self._item is None:
            return
        text = "".join(self._texts)
        yield self._of_text("done", text=text)
        yield self._part("done", part_of(self._item["type"], text))
        yield self._item_done(finished(self._item, text, seals=self._seals, is_cut=is_cut))
        self._item, self._texts = None, []

    def _calls(self, calls: Sequence[ToolCall]) -> Iterable[Frame]:
        for call in calls:
            self._space.drop()
            yield from self._close()
            item, arguments = begun_call(call, self._functions), call.arguments_json
            place = {"item_id": item["id"], "output_index": len(self._items)}
            yield self._event("response.output_item.added", output_index=len(self._items), item=item)
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
            )
            yield self._item_done(finished(item, arguments))

    def _item_done(self, item: Item) -> Frame:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part(self, what: str, part: Mapping[str, Any]) -> Frame:
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _of_text(self, what: str, **fields: Any) -> Frame:
        assert self._item is not None, "an item is open"
        kind = self._item["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self._event(f"{_TEXTS[kind]}.{what}", **self._place(), **fields, **logprobs)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None, "an item is open"
        return {"item_id": self._item["id"], "output_index": len(self._items), "content_index": 0}
