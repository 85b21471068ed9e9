"""Prompt options: text, a conversation or token ids, as every command about a prompt takes them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from icehouse_server.errors import ConfigError, Reason

if TYPE_CHECKING:
    from icehouse_client import Conversation, Prompt, PromptOptions

_PANEL = "Prompt"

Suffix = Annotated[
    str | None,
    typer.Option(
        help="Text behind a gap, which the output fills; TEXT is before it.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
"""What makes an infill prompt of a text."""

STANDARD_INPUT = "-"


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
    model: str
    adapter: str
    tenant: str

    @property
    def is_given(self) -> bool:
        """Whether there is one at all."""
        return not (self.text is None and self.messages is None and self.token_ids is None)

    @property
    def options(self) -> PromptOptions:
        """What goes with it to the Python client."""
        options: PromptOptions = {"model": self.model, "adapter": self.adapter}
        if self.tenant:
            options["tenant"] = self.tenant
        return options

    def read_around(self, suffix: str | None) -> Prompt:
        """As `read`; with a suffix the prompt is the gap between TEXT and it."""
        from icehouse_client import Infill

        if suffix is None:
            return self.read()
        prefix = self.read()
        if not isinstance(prefix, str):
            raise typer.BadParameter("--suffix is behind TEXT, which is no turn of a chat")
        return Infill(prefix, suffix)

    def read(self) -> Prompt:
        """Return the prompt; raises BadParameter for none or two, ConfigError for a file that is none."""
        # Imported here, so that `--help` starts without gRPC.
        from icehouse_client import Conversation, Image

        ways = [self.text is not None, self.messages is not None, self.token_ids is not None]
        if sum(ways) != 1:
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
        talk.say(text, images=[Image(read_bytes(path), detail=self.image_detail) for path in self.images])
        return talk


def prompt_of(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user's turn of a chat.", rich_help_panel=_PANEL)
    ] = False,
    system: Annotated[
        str, typer.Option(help="System prompt of the chat.", show_default=False, rich_help_panel=_PANEL)
    ] = "",
    messages: Annotated[
        Path | None,
        typer.Option(
            help="Conversation in a JSON file: one that `chat` has saved, or a list of role and content.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Token ids, with commas or spaces between.", rich_help_panel=_PANEL),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture that a chat's TEXT is about; again for another one.", rich_help_panel=_PANEL
        ),
    ] = None,
    image_detail: Annotated[
        ImageDetail,
        typer.Option(
            help="How much of pictures is shown; low takes fewer tokens, with models that can.",
            rich_help_panel=_PANEL,
        ),
    ] = "auto",
    model: Annotated[
        str, typer.Option(help="Refuse unless it is served.", show_default=False, rich_help_panel=_PANEL)
    ] = "",
    adapter: Annotated[
        str,
        typer.Option(help="One of the model's LoRA adapters.", show_default=False, rich_help_panel=_PANEL),
    ] = "",
    tenant: Annotated[
        str,
        typer.Option(help="Whose prompt it is, for operators.", show_default=False, rich_help_panel=_PANEL),
    ] = "",
) -> GivenPrompt:
    """Return what is said of the prompt: the group of every command about one."""
    images = tuple(image or ())
    return GivenPrompt(text, chat, system, messages, tokens, images, image_detail, model, adapter, tenant)


def read_conversation(path: Path) -> Conversation:
    """Return the conversation in a file; raises ConfigError where there is none."""
    from icehouse_client import Conversation

    try:
        return Conversation.from_json(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{path} cannot be read ({error.strerror}); name a file with a conversation",
            field="messages",
        ) from error
    except ValueError as error:
        problem = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise _no_conversation(path, problem) from error


def _no_conversation(path: Path, problem: object) -> ConfigError:
    return ConfigError(
        Reason.CONFIG_INVALID,
        f"{path} holds no conversation: {problem}; there must be what `icehouse chat` has saved, "
        'or a list such as [{"role": "user", "content": "Hello"}]',
        field="messages",
    )


def read_bytes(path: Path) -> bytes:
    """Return what is in a file; raises ConfigError where there is none to read."""
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{path} cannot be read ({error.strerror}); name a file with a picture",
            field="image",
        ) from error


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
