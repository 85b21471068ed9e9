"""Conversations meet the templates of four families: roles, tools, arguments, and refusals in their words."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.chat import (
    ChatMessage,
    Conversation,
    ImageSource,
    ImageTexts,
    PlacedImage,
    ToolChoice,
    ToolMode,
)
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.chat.history import fit

from tests.fixtures.chat.families import (
    ALTERNATING,
    CALL,
    CLOCK,
    HEADERS,
    REMEMBERING,
    SYSTEMLESS,
    THINKING,
    WEATHER,
    render,
    tokenizer_of,
    turns,
)
from tests.fixtures.models.chat_templates import Family

ASKED = turns(("user", "Hi"))
CALLED = (
    *turns(("user", "Rain?")),
    ChatMessage("assistant", "", tool_calls=(CALL,)),
    ChatMessage("tool", "dry", name="get_weather", tool_call_id=CALL.id),
)


def traits(family: Family):
    return tokenizer_of(family)._renderer.template.traits(has_tools=False)


def test_what_each_family_takes_is_found_by_trying_it() -> None:
    assert not traits(THINKING).knows_developer and not traits(HEADERS).knows_developer
    assert traits(THINKING).takes_repeated_roles and not traits(ALTERNATING).takes_repeated_roles
    assert traits(ALTERNATING).takes_first_system and not traits(ALTERNATING).takes_later_system
    assert not traits(SYSTEMLESS).takes_first_system and not traits(SYSTEMLESS).takes_repeated_roles
    assert traits(HEADERS).shows_tools and traits(ALTERNATING).shows_tools and traits(THINKING).shows_tools
    assert not traits(SYSTEMLESS).shows_tools and not traits(SYSTEMLESS).shows_tool_calls
    assert traits(THINKING).reasoning_key == "reasoning_content"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    text = render(THINKING, Conversation(turns(("developer", "Be brief."), ("user", "Hi"))))
    assert (
        text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_role_of_the_templates_own_is_written_where_the_template_writes_it() -> None:
    asked = Conversation(turns(("ipython", "2"), ("user", "Hi")))
    text = render(HEADERS, asked)
    assert text.startswith("<bos><|start_header_id|>ipython<|end_header_id|>\n\n2<|im_end|>")
    with pytest.raises(InvalidRequest, match="would silently drop") as caught:
        render(THINKING, asked)
    assert caught.value.field == "prompt.chat.messages[0].content"


def test_a_refusal_names_a_message_by_its_place_in_the_request() -> None:
    """Others may have been dropped before it since."""
    role, user = turns(("ipython", "2"), ("user", "Hi"))
    asked = Conversation((dataclasses.replace(role, sent_index=3), user))
    with pytest.raises(
        InvalidRequest, match=r"would silently drop prompt\.chat\.messages\[3\]\.content"
    ) as caught:
        render(THINKING, asked)
    assert caught.value.field == "prompt.chat.messages[3].content"


def test_systems_in_a_row_become_one() -> None:
    text = render(HEADERS, Conversation(turns(("system", "A"), ("developer", "B"), ("user", "Hi"))))
    assert text.count("system<|end_header_id|>") == 1 and "A\n\nB<|im_end|>" in text


def test_alternation_is_kept_by_merging() -> None:
    asked = turns(("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D"), ("user", "E"))
    text = render(ALTERNATING, Conversation(asked))
    assert text == "<bos>[INST]A\n\nB[/INST]C\n\nD<eos>[INST]E[/INST]"


def test_roles_in_a_row_stay_apart_where_the_template_takes_them() -> None:
    text = render(THINKING, Conversation(turns(("user", "A"), ("user", "B"))))
    assert text.startswith("<|im_start|>user\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n")


def test_a_system_that_is_not_taken_goes_before_the_next_question() -> None:
    text = render(SYSTEMLESS, Conversation(turns(("system", "Be brief."), ("user", "Hi"))))
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    later = turns(("user", "A"), ("assistant", "B"), ("system", "Now rhyme."), ("user", "C"))
    assert render(ALTERNATING, Conversation(later)) == "<bos>[INST]A[/INST]B<eos>[INST]Now rhyme.\n\nC[/INST]"


def test_a_system_at_the_end_is_asked_as_a_question() -> None:
    text = render(SYSTEMLESS, Conversation(turns(("user", "A"), ("assistant", "B"), ("system", "C"))))
    assert text.endswith("<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n")


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    refusing = Family("{{ raise_exception('Not today.') }}")
    with pytest.raises(InvalidRequest, match=r"Not today\.") as caught:
        render(refusing, Conversation(ASKED))
    assert (caught.value.reason, caught.value.field) == (Reason.CHAT_INVALID, "prompt.chat")


def test_a_template_that_breaks_says_no_word_of_the_conversation() -> None:
    arguments = {"bos_token": {"secret": 1}}
    broken = dataclasses.replace(ALTERNATING, template="{{ messages[0].content.lower.missing.more }}")
    with pytest.raises(InvalidRequest) as caught:
        render(broken, Conversation(turns(("user", "a secret")), template_arguments=arguments))
    assert caught.value.reason is Reason.CHAT_INVALID and "secret" not in caught.value.message


def test_arguments_reach_the_template() -> None:
    text = render(THINKING, Conversation(ASKED, template_arguments={"enable_thinking": False}))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert render(THINKING, Conversation(ASKED)).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict"]
)
def test_arguments_cannot_be_the_servers_own(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        render(THINKING, Conversation(ASKED, template_arguments={name: "{{ 1 }}"}))
    assert caught.value.field == "prompt.chat.template_arguments"


@pytest.mark.parametrize(
    "family", [THINKING, ALTERNATING, REMEMBERING], ids=["think", "alternate", "remember"]
)
def test_tools_and_calls_and_their_results_are_shown(family: Family) -> None:
    text = render(family, Conversation(CALLED, tools=(WEATHER, CLOCK)))
    for word in (WEATHER.description, '"get_time"', '{"city": "Oslo"}', "dry"):
        assert word in text, word


def test_what_would_be_dropped_is_refused() -> None:
    """No probe is as long as this, so what is dropped is found by the conversation itself."""
    forgetful = dataclasses.replace(
        THINKING, template="{% set messages = messages[-12:] %}" + THINKING.template
    )
    with pytest.raises(InvalidRequest, match=r"silently drop prompt\.chat\.messages\[0\]\.content") as caught:
        render(forgetful, Conversation(turns(("user", "A"), ("assistant", "B")) * 6 + ASKED))
    assert caught.value.field == "prompt.chat.messages[0].content"


def test_thoughts_may_be_dropped() -> None:
    thoughtful = ChatMessage("assistant", "ho", reasoning="what a question")
    text = render(THINKING, Conversation((*ASKED, thoughtful, *ASKED)))
    assert "ho<|im_end|>" in text and "what a question" not in text


def test_a_template_without_an_end_is_refused() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = dataclasses.replace(THINKING, template=THINKING.template + loops)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="200000 lines for a few words"):
            render(endless, Conversation(ASKED))


# Calls in a notation that nobody reads.
STRANGE = dataclasses.replace(
    HEADERS,
    template=HEADERS.template.replace('"parameters": call', '"qzwith": call').replace('"name"', '"qzdo"'),
)


@pytest.mark.parametrize(("family", "why"), [(SYSTEMLESS, "does not show them"), (STRANGE, "is unknown")])
def test_tools_are_refused_where_they_cannot_work(family: Family, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        render(family, Conversation(ASKED, tools=(WEATHER,)))
    assert (caught.value.reason, caught.value.field) == (Reason.TOOLS_UNSUPPORTED, "prompt.tools")


def test_an_answer_is_continued_where_it_stops() -> None:
    asked = turns(("user", "Hi"), ("assistant", "Well, "))
    conversation = Conversation(asked, adds_generation_prompt=False, continues_final_message=True)
    assert render(THINKING, conversation).endswith("<|im_start|>assistant\nWell, ")
    assert not tokenizer_of(THINKING).render_chat(conversation).is_reasoning


def test_reasoning_is_continued_where_it_stops() -> None:
    asked = (*ASKED, ChatMessage("assistant", "", reasoning="hm"))
    conversation = Conversation(asked, adds_generation_prompt=False, continues_final_message=True)
    assert render(REMEMBERING, conversation).endswith("<|im_start|>assistant\n<think>hm")
    assert tokenizer_of(REMEMBERING).render_chat(conversation).is_reasoning


def test_without_a_generation_prompt_the_last_turn_ends_the_prompt() -> None:
    assert render(THINKING, Conversation(ASKED, adds_generation_prompt=False)).endswith("Hi<|im_end|>\n")


def test_a_header_that_opens_the_reasoning_is_noticed() -> None:
    opening = dataclasses.replace(
        THINKING,
        template=THINKING.template.replace("{% if enable_thinking is", "<think>\n{% if enable_thinking is"),
    )
    rendered = tokenizer_of(opening).render_chat(Conversation(turns(("user", "what is </think>?"))))
    assert rendered.is_reasoning
    assert not tokenizer_of(THINKING).render_chat(Conversation(turns(("user", "a <think> b")))).is_reasoning


@pytest.mark.parametrize(
    ("family", "choice", "opening"),
    [
        (
            THINKING,
            ToolChoice(ToolMode.NAMED, "get_time"),
            '<tool_call>\n{"name": "get_time", "arguments": ',
        ),
        (THINKING, ToolChoice(ToolMode.REQUIRED), '<tool_call>\n{"name": "get_'),
        (ALTERNATING, ToolChoice(ToolMode.NAMED, "get_weather"), "[TOOL_CALLS]get_weather[ARGS]"),
        (ALTERNATING, ToolChoice(ToolMode.REQUIRED), "[TOOL_CALLS]get_"),
    ],
)
def test_a_forced_call_is_begun_in_the_templates_own_form(
    family: Family, choice: ToolChoice, opening: str
) -> None:
    conversation = Conversation(ASKED, tools=(WEATHER, CLOCK), tool_choice=choice)
    rendered = tokenizer_of(family).render_chat(conversation)
    assert rendered.opening == opening
    assert render(family, conversation).endswith(opening)
    assert not rendered.is_reasoning


def test_a_call_is_forced_behind_the_prompt_where_a_longer_past_is_written_anew() -> None:
    """Tools are shown only while the question is the last turn, so that a call after it hides them."""
    template = ALTERNATING.template.replace("asked.count == turn.last", "loop.last")
    family = dataclasses.replace(ALTERNATING, template=template)
    choice = ToolChoice(ToolMode.NAMED, "get_time")
    text = render(family, Conversation(ASKED, tools=(CLOCK,), tool_choice=choice))
    assert "[AVAILABLE_TOOLS]" in text and text.endswith("[INST]Hi[/INST][TOOL_CALLS]get_time[ARGS]")


def test_a_call_is_forced_as_text_where_the_template_writes_none() -> None:
    """As SmolLM3 and Hammer: tools are shown, calls of the past are not, those of a reply can be read."""
    calls = THINKING.template[THINKING.template.index("{%- for tool_call in") :].partition("{% endfor %}")[0]
    silent = THINKING.template.replace(calls + "{% endfor %}", "{# tool_call.name #}")
    family = dataclasses.replace(THINKING, template=silent)
    assert not traits(family).shows_tool_calls
    conversation = Conversation(CALLED, tools=(CLOCK,), tool_choice=ToolChoice(ToolMode.REQUIRED))
    rendered = tokenizer_of(family).render_chat(conversation)
    assert rendered.opening.startswith('<tool_call>\n{"name": "get_time", "arguments": ')
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in render(family, conversation)


def test_one_tool_that_is_required_is_as_good_as_named() -> None:
    conversation = Conversation(ASKED, tools=(CLOCK,), tool_choice=ToolChoice(ToolMode.REQUIRED))
    assert '"get_time", "arguments"' in tokenizer_of(THINKING).render_chat(conversation).opening


SEEING = Family(
    # As SmolVLM: a turn's content is a list of parts, and of a plain text nothing is shown.
    """{% for message in messages %}<|im_start|>{{ message['role'] }}
{%- for part in message['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}
{%- elif part['type'] == 'image' %}<picture>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
)


def with_images(role: str, content: str, *positions: int) -> ChatMessage:
    source = ImageSource(b"", "", "")
    return ChatMessage(role, content, images=tuple(PlacedImage(p, source) for p in positions))


def seen(*messages: ChatMessage, texts: tuple[str, ...]) -> str:
    return render(SEEING, Conversation(messages, image_texts=ImageTexts("<picture>", texts, ())))


def test_images_stand_where_they_were_put() -> None:
    assert {"user", "assistant"} <= traits(SEEING).part_roles and not traits(THINKING).part_roles
    shown = seen(with_images("user", "onetwo", 0, 3, 3, 6), texts=("A", "B", "C", "D"))
    assert "userA oneBC twoD<|im_end|>" in shown
    assert "userA<|im_end|>" in seen(with_images("user", "", 0), texts=("A",))
    assert " plain<|im_end|>" in render(SEEING, Conversation(turns(("user", "plain"))))


def test_images_move_with_texts_that_become_one() -> None:
    merged = fit([with_images("user", "one", 1), with_images("user", "two", 0, 3)], traits(ALTERNATING))
    assert [(m.content, [p.position for p in m.images]) for m in merged] == [("one\n\ntwo", [1, 5, 8])]
    folded = fit([ChatMessage("system", "Be brief."), with_images("user", "Hi", 2)], traits(SYSTEMLESS))
    assert [(m.content, [p.position for p in m.images]) for m in folded] == [("Be brief.\n\nHi", [13])]


def test_a_mark_in_a_text_is_refused() -> None:
    for message in (with_images("user", "<picture>", 0), ChatMessage("user", "none")):
        with pytest.raises(InvalidRequest, match="image placeholders") as caught:
            seen(message, texts=("A",))
        assert caught.value.reason is Reason.CHAT_INVALID
