"""Templates that write today's date: a conversation keeps the day it began with, a new one has its own."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from icehouse_server.domain.chat import ChatMessage, Conversation
from icehouse_server.text.chat.kept_reply import KeptReply
from transformers.utils import chat_template_utils

from tests.fixtures.chat.families import THINKING, spelled, tokenizer_of, turns

DATED = dataclasses.replace(
    THINKING,
    template="<|im_start|>system\nToday is {{ strftime_now('%Y-%m-%d') }}.<|im_end|>\n" + THINKING.template,
)


class Calendar(datetime.datetime):
    """What templates take the date from."""

    today_text = ""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Calendar:
        return cls.fromisoformat(cls.today_text)


def test_a_conversation_that_goes_on_behind_midnight_keeps_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Calendar)
    tokenizer, asked = tokenizer_of(DATED), turns(("user", "Hi"))
    monkeypatch.setattr(Calendar, "today_text", "2026-05-01")
    prompt = tokenizer.render_chat(Conversation(asked)).token_ids
    assert "Today is 2026-05-01." in spelled(tokenizer, prompt)
    known = (*prompt, *tokenizer.spell("Hello."))
    monkeypatch.setattr(Calendar, "today_text", "2026-05-02")
    [end_token_id] = tokenizer.spell("<|im_end|>")
    later = Conversation((*asked, ChatMessage("assistant", "Hello."), *turns(("user", "And now?"))))
    kept = tokenizer.render_chat(later, KeptReply(1, known, end_token_id))
    assert kept.token_ids[: len(known)] == known and kept.kept_token_count == len(known)
    assert "2026-05-02" not in spelled(tokenizer, kept.token_ids)
    assert "Today is 2026-05-02." in spelled(tokenizer, tokenizer.render_chat(later).token_ids)
