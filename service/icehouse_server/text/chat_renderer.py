"""Chat renderer: turns a conversation into the tokens of its prompt, often with the start of the reply.

Runs in the small executor of `rpc`, one caller at a time.

A model may draw tokens that the tokenizer would not choose for the same text. The cache matches tokens, so
tokenizing a past turn again would end the match; the tokens that were drawn keep it going. If they do not
decode to what the template wrote, the template's text is used.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    ImageTexts,
    RenderedChat,
    ToolCall,
)
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.call_form import NAME, around_arguments, call_form
from icehouse_server.text.chat.borders import borders_of
from icehouse_server.text.chat.history import fit
from icehouse_server.text.chat.kept_reply import KeptReply, TurnEnd, behind_mark, marked
from icehouse_server.text.chat.probes import ShownTexts, skeleton_of
from icehouse_server.text.chat.template import ChatTemplate
from icehouse_server.text.chat.traits import TemplateTraits
from icehouse_server.text.replies.reply_format import ReplyFormat

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]
CommonTokens = Callable[[Sequence[str]], int]
"""Returns how many characters of the first text the others share, cut where a token ends in all of them."""

_ARGUMENT, _ID = "qzargumentqz", "000000000"
"""Placeholders for the arguments and the id of a call that the template writes, as NAME is for its tool."""
_HEADER_TOKEN_COUNT = 8
"""Tokens of the header that are decoded along with a turn's own."""
_LONGEST_ADDED_TOKEN = 64
"""Characters of the longest special token that is searched for."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Combines the template, the tokenizer and the format of replies."""

    template: ChatTemplate
    turns: TurnTokens
    format: ReplyFormat
    common_tokens: CommonTokens
    turn_marks: re.Pattern[str]
    """Matches the special tokens between turns."""

    def render(self, conversation: Conversation, kept: KeptReply | None = None) -> RenderedChat:
        """Return the prompt; raises InvalidRequest for what the model or its template cannot do.

        With `kept`, the prompt begins with that reply's tokens if it is certain what follows them.
        """
        self._check(conversation, self._traits(conversation))
        text = None if kept is None else self._behind_kept(conversation, kept)
        if kept is None or text is None:
            kept, text = None, self._prompt_text(conversation)
            text = dataclasses.replace(text, shown=self._shown(conversation))
        tokens = self.turns.tokens(
            _with_images(text.text, text.image_texts),
            turns=text.drawn,
            headers=[text.header, self._unthinking(text.header)],
        )
        around = self._call_around(conversation)
        form = None if around is None else call_form(conversation, self.format, around, text.opening)
        before = () if kept is None else kept.token_ids
        token_ids = (*before, *tokens)
        return RenderedChat(
            token_ids,
            text.opening,
            text.is_reasoning,
            form,
            kept_token_count=len(before),
            border_token_indices=self._borders(conversation, text, token_ids),
        )

    def _borders(
        self, conversation: Conversation, text: _PromptText, token_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the token indices of message borders at which other prompts may diverge from this one."""
        if not conversation.adds_generation_prompt or conversation.tool_choice.is_forced:
            return ()
        borders = borders_of(
            text.shown,
            conversation.messages,
            has_tools=bool(conversation.tools),
            # Once a turn is over, the template writes its header without the reasoning that it opened.
            header=text.header if self._unthinking(text.header) else "",
            marks=self.turn_marks,
        )
        mark_ids = {self.turns.encode(mark)[0] for mark in borders.marks}
        return borders.token_indices(token_ids, mark_ids)

    def _behind_kept(self, conversation: Conversation, kept: KeptReply) -> _PromptText | None:
        """Return the text after a kept reply; None if it is not certain what follows it."""
        is_last = kept.index == len(conversation.messages) - 1
        if is_last and conversation.continues_final_message:
            return None
        turns = marked(conversation, kept.index)
        last = dataclasses.replace(
            turns,
            messages=(*skeleton_of(turns.messages[: kept.index]).messages, turns.messages[kept.index]),
        )
        try:
            shown = self._shown(conversation)
            text = self._prompt_text(turns)
            closing = behind_mark(self._text(last, fit(last.messages, self._traits(last))))
        except InvalidRequest:
            # If the conversation itself is invalid, rendering all of it gives the better error message.
            return None
        behind = behind_mark(text.text)
        if behind is None or closing is None or not _is_split(shown.order, kept.index):
            return None
        end = "" if kept.end_token_id is None else self.turns.decode([kept.end_token_id])
        turn_end = TurnEnd(closing, end, self.turn_marks, bool(turns.messages[kept.index].tool_calls))
        tail = turn_end.tail(behind)
        if tail is None or not self.turns.begins_apart(tail):
            return None
        images = conversation.image_texts
        if images is not None:
            earlier = conversation.messages[: kept.index + 1]
            images = images.behind(sum(len(message.images) for message in earlier))
            if tail.count(images.mark) != len(images.texts):
                return None
        return dataclasses.replace(text, text=tail, image_texts=images, shown=shown)

    def _shown(self, conversation: Conversation) -> ShownTexts:
        """Return where the prompt shows the conversation's texts; raises InvalidRequest if it drops one."""
        return self.template.check_shown(
            conversation.messages,
            tools=conversation.tools,
            arguments=conversation.template_arguments,
            adds_generation_prompt=conversation.adds_generation_prompt,
        )

    def _prompt_text(self, conversation: Conversation) -> _PromptText:
        """Return the text of a conversation's prompt; raises InvalidRequest."""
        messages = fit(conversation.messages, self._traits(conversation))
        drawn = tuple(message.token_ids for message in messages if message.token_ids)
        base = self._text(conversation, messages)
        if conversation.continues_final_message:
            text = self._text(conversation, messages, continues=True)
            header = self._header(conversation, messages[:-1]) if drawn else ""
            last = messages[-1]
            is_reasoning = bool(last.reasoning and not last.content) or self._is_open(last.content)
        elif not conversation.adds_generation_prompt:
            text, is_reasoning = base, False
            header = self._header(conversation, messages) if drawn else ""
        else:
            text = self._text(conversation, messages, adds_prompt=True)
            header = _behind(text, base)
            is_reasoning = self._is_open(header)
        opening = self.format.layout.opening(text)
        if conversation.tool_choice.is_forced:
            thought = f"\n{self.format.think_end}\n\n" if is_reasoning else ""
            text, opening = self._forced(conversation, base=base, begun=text + thought)
            is_reasoning = False
        return _PromptText(text, opening, header, drawn, is_reasoning, conversation.image_texts)

    def _traits(self, conversation: Conversation) -> TemplateTraits:
        return self.template.traits(has_tools=bool(conversation.tools))

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
        return _behind(text, base)

    def _unthinking(self, header: str) -> str:
        """Return the header as past turns have it, without the reasoning that it opens; "" if none."""
        start = self.format.think_start
        return header[: header.index(start)] if start and start in header else ""

    def _is_open(self, text: str) -> bool:
        """Whether `text` ends within reasoning."""
        if not self.format.marks_reasoning:
            return False
        return text.rfind(self.format.think_start) > text.rfind(self.format.think_end)

    def _called(self, conversation: Conversation, arguments_json: str) -> str:
        """Return the conversation's text followed by a call of `NAME`."""
        traits = self._traits(conversation)
        own_id = self.format.family.id_form.format(name=NAME, index=0) or _ID
        call = ChatMessage("assistant", "", tool_calls=(ToolCall(own_id, NAME, arguments_json),))
        return self._text(conversation, fit([*conversation.messages, call], traits))

    def _call_around(self, conversation: Conversation) -> tuple[str, str] | None:
        """Return what a call has before its arguments and after them, or None if calls are not to be
        constrained or cannot be; raises InvalidRequest if they must be but cannot."""
        if not conversation.holds_calls:
            return None
        try:
            shown = self._called(conversation, "{}")
        except InvalidRequest:
            if conversation.constrains_calls or conversation.tool_choice.is_forced:
                raise
            return None  # the template allows no call here, and the request did not insist on one
        return around_arguments(shown, conversation, self.format)

    def _forced(self, conversation: Conversation, *, base: str, begun: str) -> tuple[str, str]:
        """Return a prompt that ends with the beginning of a call, and that beginning.

        The template writes the call, as the model was trained to. The beginning is the part that depends on
        neither the tool nor its arguments, cut at the end of a token. Most templates append to `base`; if one
        renders the past differently as it grows, the call follows the usual prompt, `begun`.
        """
        start = self.format.family.call_start
        replies = []
        for arguments in ("{}", f'{{"{_ARGUMENT}": "{_ARGUMENT}"}}'):
            text = self._called(conversation, arguments)
            if not text.startswith(base):
                base = begun
            if text.startswith(base):
                replies.append(text[len(base) :])
            elif start in text[: text.find(NAME)]:
                replies.append(text[text.rindex(start, 0, text.index(NAME)) :])
        names = [tool.name for _, tool in conversation.callable_tools]
        texts = [reply.replace(NAME, name) for reply in replies for name in names]
        if texts and self._call_around(conversation) is not None:
            # Stop before the arguments: the constraint writes all of them.
            texts.append(texts[0][: texts[0].find("{", texts[0].find(names[0]) + len(names[0]))])
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
                else "the format of this model's calls is unknown"
            )
            raise InvalidRequest(
                Reason.TOOLS_UNSUPPORTED,
                f"{len(conversation.tools)} tools are offered, but {why}; leave `tools` out or describe "
                "them in a message",
                field="prompt.tools",
                metadata={"tool_count": len(conversation.tools)},
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptText:
    """A prompt before it is tokenized."""

    text: str
    opening: str
    """The start of the reply, with which the prompt ends."""
    header: str
    """What the template writes before an assistant's turn."""
    drawn: tuple[tuple[int, ...], ...]
    """The tokens of its turns that were generated."""
    is_reasoning: bool
    image_texts: ImageTexts | None
    """The texts of its images."""
    shown: ShownTexts = dataclasses.field(default_factory=ShownTexts)
    """Where the whole prompt shows the conversation's texts."""


def _is_split(order: Sequence[int], index: int) -> bool:
    """Whether the template shows every message up to the one at `index` before it shows any later one."""
    following = next((i for i, shown in enumerate(order) if shown > index), len(order))
    return bool(order) and all(shown > index for shown in order[following:])


def _behind(text: str, base: str) -> str:
    return text[len(base) :] if text.startswith(base) else ""


def _with_images(text: str, images: ImageTexts | None) -> str:
    """Return the text with each image's mark replaced by its own text."""
    if images is None:
        return text
    first, *rest = text.split(images.mark)
    if len(rest) != len(images.texts):
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            f"the prompt has {len(rest)} image placeholders {images.mark!r} for {len(images.texts)} images; "
            "texts must not contain it, and the model's chat template must show each image",
            field="prompt.chat",
            metadata={"mark_count": len(rest), "image_count": len(images.texts)},
        )
    return first + "".join(shown + part for shown, part in zip(images.texts, rest, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class TurnTokens:
    """Puts drawn turns back into a prompt. `encode` adds no special tokens, `decode` hides none."""

    encode: Encode
    decode: Decode
    eos_token_ids: frozenset[int]
    added_token_ids: frozenset[int]
    """Tokens that the tokenizer cuts out of a text first, so the text before them is tokenized by itself."""

    def tokens(self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]) -> list[int]:
        """Return the tokens of `text`, in which the drawn `turns` follow one of `headers`, in order.

        `headers` are the possible headers of a turn, the likeliest first. The result decodes to the same text
        as the plain encoding.
        """
        plain = self.encode(text)
        if not turns:
            return plain
        spliced = self._spliced(text, turns=turns, headers=[header for header in headers if header])
        return spliced if self.decode(spliced) == self.decode(plain) else plain

    def begins_apart(self, text: str) -> bool:
        """Whether a text gets the same tokens alone as after another text: it begins with an added token."""
        return not text or self.encode(text[:_LONGEST_ADDED_TOKEN])[0] in self.added_token_ids

    def _spliced(self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]) -> list[int]:
        tokens: list[int] = []
        position = 0
        for turn in turns:
            match = self._match(text, position, self._without_end(turn), headers)
            if match is not None:
                tokens += self.encode(text[position : match.start])
                tokens += match.token_ids
                position = match.stop
        return tokens + self.encode(text[position:])

    def _match(
        self, text: str, position: int, drawn: Sequence[int], headers: Sequence[str]
    ) -> _TurnMatch | None:
        """Return where the whole turn is; failing that, the part of it that follows the next header."""
        for header in headers:
            spelled = self._spelling(header)(drawn)
            start = text.find(header + spelled, position) + len(header)
            stop = start + len(spelled)
            if spelled and start >= len(header) and self._may_end(text, stop):
                return _TurnMatch(start, stop, drawn)
        starts = ((header, text.find(header, position)) for header in headers)
        parts = (
            self._beginning(text, index + len(header), drawn, header)
            for header, index in starts
            if index >= 0
        )
        return next((part for part in parts if part is not None), None)

    def _beginning(self, text: str, start: int, drawn: Sequence[int], header: str) -> _TurnMatch | None:
        """Return the longest beginning of a turn that the text has: the template may have trimmed it."""
        spelled = self._spelling(header)
        low, high = 0, len(drawn)
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(spelled(drawn[:middle]), start):
                low = middle
            else:
                high = middle - 1
        stop = start + len(spelled(drawn[:low]))
        return _TurnMatch(start, stop, drawn[:low]) if stop > start and self._may_end(text, stop) else None

    def _spelling(self, header: str) -> Decode:
        """Return a decoder of tokens that follow a header, so that a leading space survives."""
        before = self.encode(header)[-_HEADER_TOKEN_COUNT:]
        known = self.decode(before)
        return lambda token_ids: _behind(self.decode([*before, *token_ids]), known)

    def _may_end(self, text: str, stop: int) -> bool:
        """Whether a token always ends there: if not, a word of an edited turn could be split."""
        following = self.encode(text[stop : stop + _LONGEST_ADDED_TOKEN])
        return not following or following[0] in self.added_token_ids

    def _without_end(self, turn: Sequence[int]) -> list[int]:
        """Return the turn without the tokens that ended it: the template writes its own end."""
        drawn = list(turn)
        while drawn and drawn[-1] in self.eos_token_ids:
            drawn.pop()
        return drawn


@dataclasses.dataclass(frozen=True, slots=True)
class _TurnMatch:
    """Tokens for `text[start:stop]`."""

    start: int
    stop: int
    token_ids: Sequence[int]
