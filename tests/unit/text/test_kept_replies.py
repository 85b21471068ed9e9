"""A prompt that begins as an earlier one and its reply: what the template writes behind it, and nothing else.

CHAT_TEMPLATES may name a JSON file of real templates, name to text: those of `REAL` are tried too.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    ImageSource,
    ImageTexts,
    PlacedImage,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, NO_ADAPTER, ImageDigest
from icehouse_server.errors import InvalidRequest
from icehouse_server.text.chat.kept_reply import KeptReply
from icehouse_server.text.reply_memory import ReplyMemory, ReplyScope
from icehouse_server.text.tokenizer import Tokenizer

from tests.fixtures.chat.agent_loop import FAMILIES
from tests.fixtures.chat.families import (
    ALTERNATING,
    CALL,
    CLOCK,
    HEADERS,
    REMEMBERING,
    SYSTEMLESS,
    THINKING,
    WEATHER,
    spelled,
    tokenizer_of,
)
from tests.fixtures.chat.histories import (
    HISTORIES,
    REAL_TEMPLATES_FILE,
    assistant,
    real_templates,
    result,
    system,
    user,
    words_of,
)
from tests.fixtures.models.chat_templates import Family

SCOPE = ReplyScope("model", DEFAULT_TENANT, NO_ADAPTER)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a template writes an assistant's turn, for what it does not rewrite to be compared."""

    family: Family
    turn: str
    """A pattern of a turn, with its header and its end."""
    end: str
    """The token that ends a reply."""
    call_end: str = ""
    """The token that ends a reply with calls, where it is another one."""
    takes_calls: bool = True
    is_rewriting: bool = True
    """Whether the template writes past turns differently from how they were written."""

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.family)

    def others(self, text: str) -> str:
        """Return a prompt's text without the assistant's turns."""
        return re.sub(self.turn, "", text, flags=re.DOTALL)


def marks(text: str, *, special: bool = True) -> tuple[tuple[str, bool], ...]:
    return tuple((mark, special) for mark in text.split())


CHATML = r"<\|im_start\|>assistant\n.*?<\|im_end\|>\n?"
HARMONY_TURN = r"<\|start\|>assistant.*?<\|(?:end|call|return)\|>(?=<\|start\|>(?!assistant))"
GLM_TURN = r"<\|assistant\|>.*?(?=<\|(?:user|observation|system)\|>|$)"
DEEPSEEK_TURN = r"<｜Assistant｜>.*?<｜end▁of▁sentence｜>"


def agents(name: str) -> Family:
    return Family(FAMILIES[name].template, FAMILIES[name].tokens)


KINDS = {
    "thoughts dropped": Kind(THINKING, CHATML, "<|im_end|>"),
    "nothing rewritten": Kind(REMEMBERING, CHATML, "<|im_end|>", is_rewriting=False),
    "headers": Kind(
        HEADERS,
        r"<\|start_header_id\|>assistant<\|end_header_id\|>.*?<\|im_end\|>",
        "<|im_end|>",
        is_rewriting=False,
        takes_calls=False,
    ),
    "alternating": Kind(ALTERNATING, r"(?<=\[/INST\]).*?<eos>", "<eos>", is_rewriting=False),
    "no system": Kind(
        SYSTEMLESS,
        r"<start_of_turn>model\n.*?<end_of_turn>\n?",
        "<end_of_turn>",
        takes_calls=False,
    ),
    "harmony": Kind(agents("harmony"), HARMONY_TURN, "<|return|>", "<|call|>"),
    "glm": Kind(agents("glm"), r"<\|assistant\|>.*?<\|endofturn\|>", "<|endofturn|>"),
    "kimi": Kind(agents("kimi"), CHATML, "<|im_end|>"),
    "qwen-tags": Kind(agents("qwen-tags"), CHATML, "<|im_end|>"),
    "deepseek-v3.1": Kind(agents("deepseek-v3.1"), DEEPSEEK_TURN, "<｜end▁of▁sentence｜>"),
}


def reply_tokens(kind: Kind, conversation: Conversation, said: ChatMessage, seed: int) -> list[int]:
    """Return what a model may draw for a turn: the template's own text, cut at a random place."""
    tokenizer = kind.tokenizer
    prompt = spelled(tokenizer, tokenizer.render_chat(conversation).token_ids)
    answered = dataclasses.replace(
        conversation, messages=(*conversation.messages, said), adds_generation_prompt=False
    )
    whole = spelled(tokenizer, tokenizer.render_chat(answered).token_ids)
    end = kind.call_end if said.tool_calls and kind.call_end else kind.end
    text = whole[len(prompt) :] if whole.startswith(prompt) else said.content
    if end in text:
        text = text[: text.rindex(end)]
    text = text.rstrip("\n")
    cut = random.Random(seed).randint(0, len(text))
    return [*tokenizer.spell(text[:cut]), *tokenizer.spell(text[cut:])]


@dataclasses.dataclass
class Loop:
    """A conversation as an agent leads it: each turn's prompt by the template and as the server makes it."""

    kind: Kind
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    memory: ReplyMemory = dataclasses.field(default_factory=lambda: ReplyMemory(limit_bytes=1 << 20))
    known: tuple[int, ...] = ()
    """The last prompt and its reply."""
    replies: list[str] = dataclasses.field(default_factory=list)

    @property
    def conversation(self) -> Conversation:
        return Conversation(self.messages, tools=self.tools)

    def ask(self, said: ChatMessage, *following: ChatMessage, seed: int = 0) -> int:
        """Answer; check the prompt; return how many of its tokens were kept."""
        tokenizer, conversation = self.kind.tokenizer, self.conversation
        place = self.memory.place(conversation, SCOPE)
        rendered = tokenizer.render_chat(conversation, place.kept)
        plain = tokenizer.render_chat(conversation)
        text, plain_text = (spelled(tokenizer, one.token_ids) for one in (rendered, plain))
        assert (rendered.opening, rendered.is_reasoning) == (plain.opening, plain.is_reasoning)
        if rendered.kept_token_count:
            assert rendered.token_ids[: len(self.known)] == self.known
            assert rendered.kept_token_count == len(self.known)
        assert self.kind.others(text) == self.kind.others(plain_text)
        if not self.kind.is_rewriting:
            assert text == plain_text
        output = reply_tokens(self.kind, conversation, said, seed)
        end = self.kind.call_end if said.tool_calls and self.kind.call_end else self.kind.end
        [end_token_id] = tokenizer.spell(end)
        self.known = (*rendered.token_ids, *output)
        self.memory.remember(
            place,
            rendered.token_ids,
            dataclasses.replace(said, token_ids=tuple(output)),
            end_token_id,
        )
        self.messages += (as_sent_back(said) if self.kind.is_rewriting else said, *following)
        return rendered.kept_token_count


def as_sent_back(said: ChatMessage) -> ChatMessage:
    """Return a reply as a client sends it: without reasoning, calls with ids of its own and JSON anew."""
    calls = tuple(
        ToolCall(call.id, call.name, json.dumps(json.loads(call.arguments_json), indent=1))
        for call in said.tool_calls
    )
    return dataclasses.replace(said, content=said.content.strip(), reasoning="", tool_calls=calls)


def talk(kind: Kind) -> list[int]:
    """Return how much was kept of the prompts of four questions."""
    loop = Loop(kind, (system("Be kind."), user("One?")))
    said = ChatMessage("assistant", "The first answer.", reasoning="Hm, one.")
    return [
        loop.ask(said, user("Two?")),
        loop.ask(dataclasses.replace(said, content="And the second."), user("Three?"), seed=1),
        loop.ask(dataclasses.replace(said, content="Third", reasoning=""), user("Four?"), seed=2),
        loop.ask(said, seed=3),
    ]


def work(kind: Kind) -> list[int]:
    """Return how much was kept of the prompts of a loop of tools, and then of a question."""
    loop = Loop(kind, (system("Be kind."), user("Rain in Oslo?")), (WEATHER, CLOCK))
    first = ChatMessage("assistant", "", reasoning="I look.", tool_calls=(CALL,))
    time = ToolCall("ijklmnopq", "get_time", "{}")
    again = ToolCall("rstuvwxyz", "get_weather", '{"city":"Rome","days":2.0}')
    return [
        loop.ask(first, result("abcdefghi", "dry")),
        loop.ask(ChatMessage("assistant", "", tool_calls=(time,)), result("ijklmnopq", "noon"), seed=1),
        loop.ask(
            ChatMessage("assistant", "", reasoning="Rome too.", tool_calls=(again,)),
            result("rstuvwxyz", "wet"),
            seed=2,
        ),
        loop.ask(ChatMessage("assistant", "Dry."), user("Sure?"), seed=3),
        loop.ask(ChatMessage("assistant", "Yes."), seed=4),
    ]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_talk_keeps_every_reply(kind: Kind) -> None:
    first, *others = talk(kind)
    assert first == 0 and all(others), others


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS.values() if kind.takes_calls],
    ids=[name for name, kind in KINDS.items() if kind.takes_calls],
)
def test_a_loop_of_tools_keeps_every_reply(kind: Kind) -> None:
    first, *others = work(kind)
    assert first == 0 and all(others[:3]), others
    # This one shows the tools before the last question: with a new one they are elsewhere.
    assert bool(others[3]) is (kind.family is not ALTERNATING)


@dataclasses.dataclass(frozen=True)
class Real:
    """What a real template needs beside its text."""

    turn: str
    end: str
    special: str
    plain: str = ""
    call_end: str = ""
    takes_calls: bool = True
    moves_tools: bool = False
    """Whether it shows the tools before the last question."""


HERMES_TURN = r"<\|im_start\|>assistant.*?<\|im_end\|>\n?"
LLAMA_TURN = r"<\|start_header_id\|>assistant<\|end_header_id\|>.*?<\|eot_id\|>"
KIMI_TURN = r"<\|im_assistant\|>.*?<\|im_end\|>"
MISTRAL_TURN = r"(?<=\[/INST\]).*?<eos>|(?<=\[/TOOL_RESULTS\]).*?<eos>"
MISTRAL_MARKS = (
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
)
COMMAND_TURN = r"<\|CHATBOT_TOKEN\|>.*?<\|END_OF_TURN_TOKEN\|>"
THOUGHTS = "<think> </think> <tool_call> </tool_call>"
REAL = {
    "Qwen/Qwen3-0.6B": Real(CHATML, "<|im_end|>", "", THOUGHTS),
    "Qwen/Qwen3.5-4B": Real(CHATML, "<|im_end|>", "", THOUGHTS),
    "Qwen/Qwen2.5-7B-Instruct": Real(CHATML, "<|im_end|>", "", "<tool_call> </tool_call>"),
    "HuggingFaceTB/SmolLM3-3B": Real(CHATML, "<|im_end|>", "", THOUGHTS),
    "zai-org/GLM-5.1": Real(
        GLM_TURN,
        "<|user|>",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        f"{THOUGHTS} <arg_key> </arg_key> <arg_value> </arg_value>",
        call_end="<|observation|>",
    ),
    "moonshotai/Kimi-K2-Thinking": Real(
        KIMI_TURN,
        "<|im_end|>",
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|>",
        "<think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|>",
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Real(
        LLAMA_TURN, "<|eot_id|>", "<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": Real(MISTRAL_TURN, "<eos>", MISTRAL_MARKS, moves_tools=True),
    "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)": Real(
        MISTRAL_TURN, "<eos>", MISTRAL_MARKS, moves_tools=True
    ),
    "deepseek-ai/DeepSeek-R1": Real(
        r"<｜Assistant｜>.*?<｜end▁of▁sentence｜>|<｜tool▁outputs▁end｜>.*?<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<think> </think> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
        "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> "
        "<｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        takes_calls=False,
    ),
    "NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)": Real(
        HERMES_TURN, "<|im_end|>", "", "<tool_call> </tool_call>"
    ),
    "HuggingFaceH4/zephyr-7b-gemma-v0.1": Real(CHATML, "<|im_end|>", "", takes_calls=False),
    "CohereLabs/c4ai-command-a-03-2025": Real(
        COMMAND_TURN,
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> "
        "<|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|> <|START_THINKING|> "
        "<|END_THINKING|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>",
        takes_calls=False,
    ),
}


def real_kind(name: str) -> Kind:
    real = REAL[name]
    tokens = marks(real.special) + marks(real.plain, special=False)
    own = {"<|im_start|>", "<|im_end|>", "<bos>", "<eos>"}
    family = Family(real_templates()[name], tuple(token for token in tokens if token[0] not in own))
    return Kind(family, real.turn, real.end, real.call_end, real.takes_calls)


@pytest.mark.skipif(not REAL_TEMPLATES_FILE, reason="CHAT_TEMPLATES names no file of templates")
@pytest.mark.parametrize("name", REAL)
def test_real_templates_keep_every_reply(name: str) -> None:
    kind = real_kind(name)
    first, *others = talk(kind)
    assert first == 0 and all(others), others
    if kind.takes_calls:
        first, *others = work(kind)
        assert first == 0 and all(others[:3]), others
        assert bool(others[3]) is not REAL[name].moves_tools


def check_history(kind: Kind, name: str) -> int:
    """Keep each reply of a history in turn; return how many could be kept."""
    messages = HISTORIES[name]
    tokenizer = kind.tokenizer
    kept_count = 0
    for index in (i for i, message in enumerate(messages) if message.role == "assistant"):
        before, after = messages[: index + 1], messages[index + 1 :]
        try:
            plain = spelled(tokenizer, tokenizer.render_chat(Conversation(messages)).token_ids)
        except InvalidRequest:
            continue
        for end in filter(None, (kind.end, kind.call_end, "a")):
            known = KeptReply(index, tuple(tokenizer.spell("Known.")), tokenizer.spell(end)[0])
            rendered = tokenizer.render_chat(Conversation(messages), known)
            text = spelled(tokenizer, rendered.token_ids)
            if not rendered.kept_token_count:
                assert text == plain
                continue
            kept_count += 1
            tail = text.removeprefix("Known.")
            assert tail != text and plain.endswith(tail)
            new = set(words_of(after))
            assert [word for word in new if word not in tail] == []
            # A result may be shown with the tool's name.
            old = {message.content for message in before if len(message.content) > 1} - new
            assert [word for word in old if word in tail] == []
    return kept_count


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_what_follows_a_reply_is_all_that_follows_it(kind: Kind) -> None:
    assert sum(check_history(kind, name) for name in HISTORIES) > len(HISTORIES)


@pytest.mark.skipif(not REAL_TEMPLATES_FILE, reason="CHAT_TEMPLATES names no file of templates")
@pytest.mark.parametrize("name", REAL)
def test_what_follows_a_reply_in_real_templates(name: str) -> None:
    kind = real_kind(name)
    assert sum(check_history(kind, history) for history in HISTORIES) > len(HISTORIES) // 2


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8),
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "qz1qz", "\n", " "]
        ),
        st.sampled_from(
            ["[INST]", "[/INST]", "<eos>", "<|eot_id|>", "<|call|>", "<|end|>", "<|start|>assistant"]
        ),
    ),
    min_size=1,
    max_size=4,
).map("".join)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=25, deadline=None)
@given(said=st.lists(TEXTS, min_size=3, max_size=5))
def test_any_text_of_anybody_stays_what_it_was(kind: Kind, said: list[str]) -> None:
    """Also such that looks like the template's marks or ours."""
    tokenizer = kind.tokenizer
    messages = tuple((user, assistant)[index % 2](text) for index, text in enumerate(said))
    index = 1
    try:
        plain = spelled(tokenizer, tokenizer.render_chat(Conversation(messages)).token_ids)
    except InvalidRequest:
        return
    known = KeptReply(index, tuple(tokenizer.spell("Known.")), tokenizer.spell(kind.end)[0])
    rendered = tokenizer.render_chat(Conversation(messages), known)
    text = spelled(tokenizer, rendered.token_ids)
    if not rendered.kept_token_count:
        assert text == plain
        return
    tail = text.removeprefix("Known.")
    assert tail != text and plain.endswith(tail)
    before = messages[: index + 1]
    shorter = spelled(
        tokenizer, tokenizer.render_chat(Conversation(before, adds_generation_prompt=False)).token_ids
    )
    assert len(tail) >= len(plain) - len(shorter) - len(kind.end)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("text", ["qzkeptreplyqz", "qzkepttoolqz"])
def test_a_text_that_is_our_mark_makes_nothing_certain(index: int, text: str) -> None:
    messages = [user("One?"), assistant("First."), user("Two?")]
    messages[index] = user(f"One {text}?")
    tokenizer = KINDS["nothing rewritten"].tokenizer
    known = KeptReply(1, tuple(tokenizer.spell("Known.")), tokenizer.spell("<|im_end|>")[0])
    rendered = tokenizer.render_chat(Conversation(tuple(messages)), known)
    if index == 2 or text == "qzkeptreplyqz":
        assert rendered == tokenizer.render_chat(Conversation(tuple(messages)))
    else:
        assert rendered.kept_token_count


def test_a_reply_that_is_continued_is_rendered() -> None:
    tokenizer = KINDS["nothing rewritten"].tokenizer
    said = Conversation(
        (user("One?"), assistant("First.")), adds_generation_prompt=False, continues_final_message=True
    )
    known = KeptReply(1, tuple(tokenizer.spell("Known.")), tokenizer.spell("<|im_end|>")[0])
    assert tokenizer.render_chat(said, known) == tokenizer.render_chat(said)


def test_a_refused_conversation_is_refused_with_its_own_reason() -> None:
    tokenizer = KINDS["no system"].tokenizer
    known = KeptReply(1, (1, 2), None)
    messages = (user("One?"), assistant("First."), ChatMessage("critic", "Two?"))
    reasons = []
    for kept in (None, known):
        with pytest.raises(InvalidRequest) as caught:
            tokenizer.render_chat(Conversation(messages), kept)
        reasons.append((caught.value.reason, caught.value.message))
    assert reasons[0] == reasons[1]


def test_a_forced_call_comes_behind_a_kept_reply() -> None:
    tokenizer = KINDS["nothing rewritten"].tokenizer
    said = Conversation(
        (user("One?"), assistant("First."), user("Two?")),
        tools=(WEATHER,),
        tool_choice=ToolChoice(ToolMode.REQUIRED),
    )
    known = KeptReply(1, tuple(tokenizer.spell("Known.")), tokenizer.spell("<|im_end|>")[0])
    rendered, plain = tokenizer.render_chat(said, known), tokenizer.render_chat(said)
    assert rendered.opening == plain.opening != ""
    text = spelled(tokenizer, rendered.token_ids)
    assert text.startswith("Known.<|im_end|>\n<|im_start|>user\nTwo?") and text.endswith(plain.opening)


SEEING = Family(
    """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<picture>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
)


def seen(*counts: int, texts: Sequence[str]) -> Conversation:
    """Return a conversation with so many images in the user's turns."""
    source = ImageSource(b"x", "image/png", "images")
    messages = []
    for count in counts:
        pictures = tuple(PlacedImage(0, source) for _ in range(count))
        messages += [ChatMessage("user", "Look.", images=pictures), assistant("I see.")]
    digests = tuple(ImageDigest(text.encode()) for text in texts)
    images = ImageTexts("<picture>", tuple(texts), digests)
    return Conversation(tuple(messages[:-1]), image_texts=images)


def test_images_behind_a_kept_reply_stand_where_they_were_put() -> None:
    tokenizer = tokenizer_of(SEEING)
    known = KeptReply(1, tuple(tokenizer.spell("Known.")), tokenizer.spell("<|im_end|>")[0])
    rendered = tokenizer.render_chat(seen(2, 1, 0, 1, texts="ABCD"), known)
    text = spelled(tokenizer, rendered.token_ids)
    assert text.startswith("Known.<|im_end|>\n<|im_start|>user\nCLook.<|im_end|>")
    assert text.endswith("<|im_start|>user\nDLook.<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_with_the_mark_of_an_image_is_refused_as_before() -> None:
    tokenizer = tokenizer_of(SEEING)
    known = KeptReply(1, (1,), tokenizer.spell("<|im_end|>")[0])
    conversation = seen(1, 1, texts="AB")
    said = dataclasses.replace(conversation.messages[2], content="a <picture>")
    conversation = dataclasses.replace(conversation, messages=(*conversation.messages[:2], said))
    with pytest.raises(InvalidRequest, match="image placeholders"):
        tokenizer.render_chat(conversation, known)


def test_a_reply_is_known_by_the_images_before_it() -> None:
    memory = ReplyMemory(limit_bytes=1 << 20)
    before = seen(1, texts="A")
    place = memory.place(before, SCOPE)
    memory.remember(place, (1, 2), assistant("I see."), 4)
    for texts, is_known in (("AB", True), ("AC", True), ("BB", False)):
        assert (memory.place(seen(1, 1, texts=texts), SCOPE).kept is not None) is is_known
