"""Prompt options: text, a conversation or token ids, as every command about a prompt takes them."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from icehouse_client.chat import Image, Infill
from icehouse_client.cli.console import UsageError
from icehouse_client.cli.option_groups import said
from icehouse_client.conversation import Conversation
from icehouse_client.requests import Prompt, PromptOptions

STANDARD_INPUT = "-"

_option = functools.partial(typer.Option, rich_help_panel="Prompt")
_named = functools.partial(_option, show_default=False)

_MODEL, _ADAPTER = "Refuse unless it is served.", "One of the model's LoRA adapters."
Model = Annotated[str, typer.Option(help=_MODEL, show_default=False)]
Adapter = Annotated[str, typer.Option(help=_ADAPTER, show_default=False)]
"""Of commands about something else than a prompt."""

Suffix = Annotated[str | None, _named(help="Text behind a gap, which the output fills; TEXT is before it.")]
"""What makes an infill prompt of a text."""

ImageDetail = Literal["auto", "low", "high"]
"""How much of a picture the model is shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What the command line says of a prompt."""

    text: str | None
    is_chat: bool
    system: str
    messages: Path | None
    token_ids: str | None
    images: tuple[Path, ...]
    image_detail: ImageDetail
    options: PromptOptions
    """What goes with it to the client."""

    @property
    def is_given(self) -> bool:
        """Whether there is one at all."""
        return any(way is not None for way in (self.text, self.messages, self.token_ids))

    def read_around(self, suffix: str | None) -> Prompt:
        """As `read`; with a suffix the prompt is the gap between TEXT and it."""
        prefix = self.read()
        if suffix is None:
            return prefix
        if not isinstance(prefix, str):
            raise typer.BadParameter("--suffix is behind TEXT, which is no turn of a chat")
        return Infill(prefix, suffix)

    def read(self) -> Prompt:
        """Return the prompt; raises BadParameter for none or two, UsageError for a file that is none."""
        if [self.text, self.messages, self.token_ids].count(None) != 2:
            raise typer.BadParameter("say one of TEXT (- for standard input), --messages and --tokens")
        if self.images and self.text is None:
            raise typer.BadParameter("--image shows a picture with TEXT")
        if self.token_ids is not None:
            return read_token_ids(self.token_ids)
        if self.messages is not None:
            talk = read_conversation(self.messages)
            if not talk:
                raise _no_conversation(self.messages, "there is no message in it")
            talk.system = self.system or talk.system
            return talk
        text = sys.stdin.read() if self.text == STANDARD_INPUT else self.text or ""
        if not (self.is_chat or self.system or self.images):
            return text
        talk = Conversation(system=self.system)
        pictures = [Image(_read(path, "a picture"), detail=self.image_detail) for path in self.images]
        talk.say(text, images=pictures)
        return talk


def prompt_of(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    chat: Annotated[bool, _option("--chat", help="TEXT is a user's turn of a chat.")] = False,
    system: Annotated[str, _named(help="System prompt of the chat.")] = "",
    messages: Annotated[
        Path | None,
        _option(
            help="Conversation in a JSON file: one that `chat` has saved, or a list of role and content."
        ),
    ] = None,
    tokens: Annotated[str | None, _option(help="Token ids, with commas or spaces between.")] = None,
    image: Annotated[
        list[Path] | None, _option(help="Picture that a chat's TEXT is about; again for another one.")
    ] = None,
    image_detail: Annotated[
        ImageDetail,
        _option(help="How much of pictures is shown; low takes fewer tokens, with models that can."),
    ] = "auto",
    model: Annotated[str, _named(help=_MODEL)] = "",
    adapter: Annotated[str, _named(help=_ADAPTER)] = "",
    tenant: Annotated[str, _named(help="Whose prompt it is, for operators.")] = "",
) -> GivenPrompt:
    """Return what is said of the prompt: the group of every command about one."""
    options = said(model=model, adapter=adapter, tenant=tenant)
    return GivenPrompt(text, chat, system, messages, tokens, tuple(image or ()), image_detail, options)


def read_conversation(path: Path) -> Conversation:
    """Return the conversation in a file; raises UsageError where there is none."""
    content = _read(path, "a conversation")
    try:
        return Conversation.from_json(content.decode("utf-8"))
    except ValueError as error:
        problem = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise _no_conversation(path, problem) from error


def _no_conversation(path: Path, problem: object) -> UsageError:
    return UsageError(
        f"{path} holds no conversation: {problem}; there must be what `icehouse chat` has saved, "
        'or a list such as [{"role": "user", "content": "Hello"}]'
    )


def _read(path: Path, wanted: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a file with {wanted}") from error


def read_token_ids(text: str) -> list[int]:
    """Return the numbers in a text; raises BadParameter for what is none."""
    try:
        token_ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} are no token ids; say them as 1,2,3") from error
    for token_id in token_ids:
        if not -(2**31) <= token_id < 2**31:
            raise typer.BadParameter(f"{token_id} is no token id: no vocabulary has so many tokens")
    return token_ids
