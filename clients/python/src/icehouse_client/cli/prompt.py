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
from icehouse_client.cli.console import UsageError, expanded
from icehouse_client.cli.option_groups import said
from icehouse_client.conversation import Conversation
from icehouse_client.requests import Prompt, PromptOptions

_option = functools.partial(typer.Option, rich_help_panel="Prompt")
_named = functools.partial(_option, show_default=False)

_MODEL, _ADAPTER = "Model to use; refused if it is not served.", "LoRA adapter of the model."
Model = Annotated[str, typer.Option(help=_MODEL, show_default=False)]
Adapter = Annotated[str, typer.Option(help=_ADAPTER, show_default=False)]
"""Of commands about something else than a prompt."""

Suffix = Annotated[str | None, _named(help="Text after the gap that the output fills; TEXT is before it.")]
"""What makes an infill prompt of a text."""

ImageDetail = Literal["auto", "low", "high"]
"""How much of a picture the model is shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What the command line says of a prompt; `prompt` is None where it names none."""

    prompt: Prompt | None
    options: PromptOptions
    """What goes with it to the client."""

    def read(self, suffix: str | None = None) -> Prompt:
        """Return the prompt, with a suffix the gap between TEXT and it; raises BadParameter for none."""
        if self.prompt is None:
            raise typer.BadParameter("give one of TEXT (- for standard input), --messages and --tokens")
        if suffix is None:
            return self.prompt
        if not isinstance(self.prompt, str):
            raise typer.BadParameter("--suffix needs a TEXT that is not a turn of a chat")
        return Infill(self.prompt, suffix)


def prompt_of(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    chat: Annotated[bool, _option("--chat", help="TEXT is a user's turn of a chat.")] = False,
    system: Annotated[str, _named(help="System prompt of the chat.")] = "",
    messages: Annotated[
        Path | None,
        _option(help="Conversation in a JSON file: one saved by `chat`, or a list of role and content."),
    ] = None,
    tokens: Annotated[str | None, _option(help="Token ids, separated by commas or spaces.")] = None,
    image: Annotated[
        list[Path] | None, _option(help="Image file to send with TEXT in a chat; may be repeated.")
    ] = None,
    image_detail: Annotated[
        ImageDetail,
        _option(help="Detail of images; low takes fewer tokens, with models that can."),
    ] = "auto",
    model: Annotated[str, _named(help=_MODEL)] = "",
    adapter: Annotated[str, _named(help=_ADAPTER)] = "",
    tenant: Annotated[str, _named(help="Tenant to act for; operators only.")] = "",
) -> GivenPrompt:
    """Return what is said of the prompt: the group of every command about one.

    Raises BadParameter for two prompts, UsageError for a file that is none.
    """
    options = said(model=model, adapter=adapter, tenant=tenant)
    if (text, messages, tokens).count(None) < 2:
        raise typer.BadParameter("give one of TEXT (- for standard input), --messages and --tokens")
    if image and text is None:
        raise typer.BadParameter("--image needs TEXT")
    if tokens is not None:
        return GivenPrompt(read_token_ids(tokens), options)
    if messages is not None:
        talk = read_conversation(messages)
        if not talk:
            raise _no_conversation(messages, "it has no messages")
        talk.system = system or talk.system
        return GivenPrompt(talk, options)
    if text is None:
        return GivenPrompt(None, options)
    text = given_text(text)
    if not (chat or system or image):
        return GivenPrompt(text, options)
    talk = Conversation(system=system)
    pictures = [Image(_read(path, "a picture"), detail=image_detail) for path in image or ()]
    talk.say(text, images=pictures)
    return GivenPrompt(talk, options)


def given_text(word: str) -> str:
    """Return an argument, or all of standard input where it is `-`."""
    return sys.stdin.read() if word == "-" else word


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
        f"{path} is not a conversation: {problem}; it must be one that `icehouse chat` saved, "
        'or a list such as [{"role": "user", "content": "Hello"}]'
    )


def _read(path: Path, wanted: str) -> bytes:
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a file with {wanted}") from error


def read_token_ids(text: str) -> list[int]:
    """Return the numbers in a text; raises BadParameter for what is none."""
    try:
        token_ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} are not token ids; write them as 1,2,3") from error
    for token_id in token_ids:
        if not -(2**31) <= token_id < 2**31:
            raise typer.BadParameter(f"{token_id} is not a token id: no vocabulary has so many tokens")
    return token_ids
