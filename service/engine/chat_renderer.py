"""From a conversation to the tokens of its prompt, and how the reply begins in them.

Runs in the rpc room's small executor, one caller at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from service.domain.chat import ChatMessage, Conversation, RenderedChat, ToolCall, ToolMode
from service.engine.chat_fit import TemplateTraits, fit
from service.engine.chat_template import ChatTemplate
from service.engine.chat_tokens import TurnTokens
from service.engine.reply_format import ReplyFormat
from service.errors import InvalidRequest, Reason

CommonTokens = Callable[[Sequence[str]], int]
"""Characters of the first text whose tokens all the others begin with."""

# A call in the template's own form; its name and argument stand for those of the tools on offer.
_NAME, _ARGUMENT, _ID = "qzcalledqz", "qzargumentqz", "000000000"


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Wires the template, the tokenizer and the format of replies together."""

    template: ChatTemplate
    turns: TurnTokens
    format: ReplyFormat
    common_tokens: CommonTokens

    def render(self, conversation: Conversation) -> RenderedChat:
        """Return the prompt; raises InvalidRequest for what the model or its template cannot do."""
        traits = self.template.traits
        self._check(conversation, traits)
        messages = fit(conversation.messages, traits)
        drawn = [message.token_ids for message in messages if message.token_ids]
        base = self._text(conversation, messages)
        if conversation.continues_final_message:
            text = self._text(conversation, messages, continues=True)
            header = self._header(conversation, messages[:-1]) if drawn else ""
            is_reasoning = self._is_open_in(messages[-1])
        elif not conversation.adds_generation_prompt:
            text, is_reasoning = base, False
            header = self._header(conversation, messages) if drawn else ""
        else:
            text = self._text(conversation, messages, adds_prompt=True)
            header = text[len(base) :] if text.startswith(base) else ""
            is_reasoning = self._is_open(header)
        opening = ""
        if conversation.tool_choice.is_forced:
            thought = f"\n{self.format.think_end}\n\n" if is_reasoning else ""
            text, opening = self._forced(conversation, messages, base=base, begun=text + thought)
            is_reasoning = False
        tokens = self.turns.tokens(text, turns=drawn, headers=[header, self._unthinking(header)])
        return RenderedChat(tuple(tokens), opening=opening, is_reasoning=is_reasoning)

    def _text(
        self,
        conversation: Conversation,
        messages: Sequence[ChatMessage],
        *,
        adds_prompt: bool = False,
        continues: bool = False,
    ) -> str:
        return self.template.text(
            messages,
            tools=conversation.tools,
            arguments=conversation.template_arguments,
            adds_generation_prompt=adds_prompt,
            continues_final_message=continues,
        )

    def _header(self, conversation: Conversation, messages: Sequence[ChatMessage]) -> str:
        """Return what the template writes before an assistant's turn."""
        if not messages:
            return ""
        base = self._text(conversation, messages)
        text = self._text(conversation, messages, adds_prompt=True)
        return text[len(base) :] if text.startswith(base) else ""

    def _unthinking(self, header: str) -> str:
        """Return the header without the reasoning that it opens: turns of the past have none."""
        start = self.format.think_start
        return header[: header.index(start)] if start and start in header else ""

    def _is_open(self, text: str) -> bool:
        """Whether `text` ends within reasoning."""
        if not self.format.marks_reasoning:
            return False
        return text.rfind(self.format.think_start) > text.rfind(self.format.think_end)

    def _is_open_in(self, message: ChatMessage) -> bool:
        continues_reasoning = bool(message.reasoning) and not message.content
        return continues_reasoning or self._is_open(message.content)

    def _forced(
        self, conversation: Conversation, messages: Sequence[ChatMessage], *, base: str, begun: str
    ) -> tuple[str, str]:
        """Return a prompt that ends with the beginning of a call, and that beginning.

        The template writes it: the form of the calls is the one that the model was trained on. What
        does not depend on the tool or its arguments is the beginning; it ends where a token ends.
        Most templates go on from `base`; one that writes the past anew when it grows cannot, and then
        the call goes behind the usual prompt, `begun`.
        """
        start = self.format.call_start
        replies = []
        for arguments in ("{}", f'{{"{_ARGUMENT}": "{_ARGUMENT}"}}'):
            call = ChatMessage("assistant", "", tool_calls=(ToolCall(_ID, _NAME, arguments),))
            text = self._text(conversation, [*messages, call])
            if not text.startswith(base):
                base = begun
            if text.startswith(base):
                replies.append(text[len(base) :])
            elif start in text[: text.find(_NAME)]:
                replies.append(text[text.rindex(start, 0, text.index(_NAME)) :])
        choice = conversation.tool_choice
        names = [choice.name] if choice.mode is ToolMode.NAMED else [t.name for t in conversation.tools]
        texts = [reply.replace(_NAME, name) for reply in replies for name in names]
        common = texts[0][: self.common_tokens(texts)] if texts else ""
        if start not in common:
            raise InvalidRequest(
                Reason.TOOLS_UNSUPPORTED,
                "this model's chat template does not show how a call begins, so none can be required; "
                "leave tool_choice out",
                field="tool_choice",
            )
        return base + common, common[common.index(start) :]

    def _check(self, conversation: Conversation, traits: TemplateTraits) -> None:
        if conversation.tools and not (traits.shows_tools and self.format.marks_calls):
            why = (
                "the model's chat template does not show them to the model"
                if not traits.shows_tools
                else "the form of this model's calls is not known"
            )
            raise InvalidRequest(
                Reason.TOOLS_UNSUPPORTED,
                f"{len(conversation.tools)} tools are offered, but {why}; leave `tools` out or describe "
                "them in a message",
                field="tools",
                metadata={"tool_count": len(conversation.tools)},
            )
        for index, message in enumerate(conversation.messages):
            if message.tool_calls and not traits.shows_tool_calls:
                raise _dropped("tool_calls", f"chat.messages[{index}].tool_calls")
            if message.role == "tool" and not traits.shows_tool_results:
                raise _dropped('messages of role "tool"', f"chat.messages[{index}].role")


def common_text_length(texts: Sequence[str], ends: Sequence[Sequence[int]] | None) -> int:
    """Return how long the common beginning is, cut back to one of `ends`: ends of the first text's tokens.

    Without `ends` nothing is known of tokens, and the whole common beginning counts.
    """
    different = (i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    common = next(different, min(map(len, texts)))
    if ends is None:
        return common
    shared = set(ends[0]).intersection(*ends[1:])
    return max((end for end in shared if end <= common), default=0)


def _dropped(what: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.CHAT_INVALID,
        f"the model's chat template would drop {what} without a word; say it in a user's message instead",
        field=field,
        metadata={"what": what},
    )
