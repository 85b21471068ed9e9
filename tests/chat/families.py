"""Tokenizers of the families of chat templates, and short ways to write a conversation."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from icehouse_server.domain.chat import ChatMessage, Conversation, Tool, ToolCall
from icehouse_server.engine.runner import mlx_lm
from icehouse_server.text.tokenizer import Tokenizer

from tests.models import chat_templates
from tests.models.chat_templates import Family, write_family

THINKING, REMEMBERING = chat_templates.THINKING, chat_templates.REMEMBERING
HEADERS, ALTERNATING, SYSTEMLESS = (
    chat_templates.HEADERS,
    chat_templates.ALTERNATING,
    chat_templates.SYSTEMLESS,
)

WEATHER = Tool(
    name="get_weather",
    description="Tells the weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
)
CLOCK = Tool(name="get_time", description="", parameters={"type": "object", "properties": {}})
CALL = ToolCall(id="abcdefghi", name="get_weather", arguments_json='{"city": "Oslo"}')


@functools.cache
def tokenizer_of(family: Family) -> Tokenizer:
    """Return the family's tokenizer, made once."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder), family)
        return Tokenizer(mlx_lm.read_tokenizer(path, eos_token_ids=None, trust_remote_code=False))


def turns(*pairs: tuple[str, str]) -> tuple[ChatMessage, ...]:
    """Return messages of (role, content)."""
    return tuple(ChatMessage(role, content) for role, content in pairs)


def render(family: Family, conversation: Conversation) -> str:
    """Return the text of a conversation's prompt, special tokens included."""
    tokenizer = tokenizer_of(family)
    return "".join(spelled(tokenizer, tokenizer.render_chat(conversation).token_ids))


def spelled(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    """Return the text of tokens with every special one of them."""
    return tokenizer._decode(token_ids, hides_special_tokens=False)
