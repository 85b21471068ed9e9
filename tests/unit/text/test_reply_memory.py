"""Memory of replies: found by the conversation before them, by nobody else, and within its bounds."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence

from icehouse_server.domain.chat import ChatMessage, Conversation, Tool, ToolCall
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, Tenant
from icehouse_server.domain.stats import ReplyStats
from icehouse_server.text.chat.kept_reply import KeptReply
from icehouse_server.text.reply_memory import ENTRY_BYTES, ReplyMemory, ReplyPlace, ReplyScope

from tests.fixtures.chat.histories import assistant, result, system, user

ANN, BOB = (ReplyScope("model", Tenant(name), NO_ADAPTER) for name in ("ann", "bob"))
ASKED = (system("Be kind."), user("Rain?"))
SAID = assistant("Dry. ")
DRAWN = dataclasses.replace(SAID, token_ids=(4,))
END = 7


def answer(
    memory: ReplyMemory,
    messages: Sequence[ChatMessage],
    said: ChatMessage = SAID,
    *,
    scope: ReplyScope = ANN,
    tokens: tuple[int, ...] = (1, 2, 3),
) -> tuple[int, ...]:
    """Answer a conversation; return its prompt, which begins with what is known, and its reply."""
    place = memory.place(Conversation(tuple(messages)), scope)
    prompt = (*(place.kept.token_ids if place.kept else ()), *tokens)
    memory.remember(place, prompt, dataclasses.replace(said, token_ids=(4, 5)), END)
    return (*prompt, 4, 5)


def known(
    memory: ReplyMemory, messages: Sequence[ChatMessage], scope: ReplyScope = ANN, **fields: object
) -> KeptReply | None:
    """Return what is known of a conversation."""
    conversation = dataclasses.replace(Conversation(tuple(messages)), **fields)  # type: ignore[arg-type]
    return memory.place(conversation, scope).kept


def roomy() -> ReplyMemory:
    return ReplyMemory(limit_bytes=1 << 20)


def test_a_reply_is_found_by_the_turns_up_to_it() -> None:
    memory = roomy()
    tokens = answer(memory, ASKED)
    assert known(memory, ASKED) is None
    for following in ((), (user("Sure?"),), (user("Sure?"), assistant("Of another server"), user("And?"))):
        assert known(memory, (*ASKED, SAID, *following)) == KeptReply(2, tokens, END)
    assert known(memory, (user("Rain?"), SAID)) is None
    assert known(memory, (*ASKED, assistant("Wet."))) is None


def test_the_longest_known_beginning_counts_and_each_fork_has_its_own() -> None:
    memory = roomy()
    first = answer(memory, ASKED)
    one, two = ((*ASKED, SAID, user(question)) for question in ("Sure?", "Why?"))
    one_tokens, two_tokens = answer(memory, one, tokens=(8,)), answer(memory, two, tokens=(9,))
    assert one_tokens == (*first, 8, 4, 5) and two_tokens == (*first, 9, 4, 5)
    assert known(memory, (*one, SAID)) == KeptReply(4, one_tokens, END)
    assert known(memory, (*two, SAID)) == KeptReply(4, two_tokens, END)
    again = answer(memory, ASKED, assistant("Another."), tokens=(1, 2, 3))
    assert known(memory, (*ASKED, assistant("Another."), user("Sure?"))) == KeptReply(2, again, END)


def test_what_a_client_adds_to_a_call_by_default_changes_nothing() -> None:
    """Claude Code sends Edit's calls back with `replace_all` that the model left out."""

    def edit(arguments: str) -> ChatMessage:
        return ChatMessage("assistant", "", tool_calls=(ToolCall("1", "edit", arguments),))

    memory = roomy()
    answer(memory, ASKED, edit('{"line": 0, "text": ""}'))
    for added in ('"replace_all": false', '"where": null'):
        assert known(memory, (*ASKED, edit(f'{{"line": 0, "text": "", {added}}}'))) is not None
    for changed in ('"line": 0', '"line": 0, "text": "", "replace_all": true', '"line": false, "text": ""'):
        assert known(memory, (*ASKED, edit(f"{{{changed}}}"))) is None


def test_nobody_finds_anothers() -> None:
    memory = roomy()
    answer(memory, ASKED)
    sent = (*ASKED, SAID)
    assert known(memory, sent, BOB) is None
    assert known(memory, sent, dataclasses.replace(ANN, model="another")) is None
    assert known(memory, sent, dataclasses.replace(ANN, adapter=AdapterName("formal"))) is None
    assert known(memory, sent, tools=(Tool("look", "", {}),)) is None
    assert known(memory, sent, template_arguments={"enable_thinking": False}) is None
    assert known(memory, sent) is not None


def test_a_reply_is_matched_by_what_it_means() -> None:
    memory = roomy()
    made = (ToolCall("a", "look", '{"x": 1.0, "y": [2]}'), ToolCall("b", "look", "{}"))
    said = ChatMessage("assistant", "\nI look.", reasoning="Hm.", tool_calls=made)
    answer(memory, ASKED, said)

    def sent(**changed: object) -> tuple[ChatMessage, ...]:
        back = dataclasses.replace(said, **changed)  # type: ignore[arg-type]
        return (*ASKED, back, result(back.tool_calls[0].id, "dry"))

    anew = (ToolCall("other", "look", '{"y":[2],"x":1}'), ToolCall("ids", "look", "{ }"))
    for same in ({}, {"content": "I look."}, {"reasoning": ""}, {"reasoning": "Hm.\n"}, {"tool_calls": anew}):
        assert known(memory, sent(**same)) is not None
    called = ToolCall("a", "look", '{"x": 2, "y": [2]}')
    for other in (
        {"content": "I looked."},
        {"reasoning": "Hm?"},
        {"tool_calls": made[:1]},
        {"tool_calls": (made[1], made[0])},
        {"tool_calls": (called, made[1])},
        {"tool_calls": (dataclasses.replace(made[0], name="see"), made[1])},
        {"name": "Ann"},
    ):
        assert known(memory, sent(**other)) is None


def test_results_are_linked_by_the_place_of_their_calls() -> None:
    """A client that names calls anew names them alike in the result."""
    memory = roomy()
    calls = (ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}"))
    said = ChatMessage("assistant", "", tool_calls=calls)
    answer(memory, (*ASKED, said, result("a", "dry"), result("b", "wet")))
    renamed = dataclasses.replace(said, tool_calls=(ToolCall("c", "look", "{}"), ToolCall("d", "look", "{}")))
    assert known(memory, (*ASKED, renamed, result("c", "dry"), result("d", "wet"), SAID)) is not None
    assert known(memory, (*ASKED, renamed, result("d", "dry"), result("c", "wet"), SAID)) is None


def test_reasoning_of_earlier_turns_may_be_left_out_but_not_be_another() -> None:
    memory = roomy()
    thought = assistant("Dry.", reasoning="Hm.")
    answer(memory, ASKED, thought)
    answer(memory, (*ASKED, thought, user("Sure?")))
    for reasoning, index in (("Hm.", 4), ("", 4), ("Aha!", None)):
        turn = assistant("Dry.", reasoning=reasoning)
        found = known(memory, (*ASKED, turn, user("Sure?"), SAID))
        assert (found and found.index) == index
    foreign = assistant("Dry.", reasoning="Of another server.")
    answer(memory, (*ASKED, foreign, user("Sure?")))
    assert known(memory, (*ASKED, foreign, user("Sure?"), SAID)) is not None


def test_half_of_a_surrogate_pair_and_endless_arguments_are_no_error() -> None:
    memory = roomy()
    deep = "[" * 100_000
    said = ChatMessage("assistant", "\ud800", tool_calls=(ToolCall("a", "look", deep),))
    answer(memory, ASKED, said)
    assert known(memory, (*ASKED, said)) is not None


def test_the_same_reply_twice_is_kept_once() -> None:
    memory = roomy()
    tokens = answer(memory, ASKED)
    answer(memory, ASKED, tokens=(6, 6, 6))
    assert known(memory, (*ASKED, SAID)) == KeptReply(2, tokens, END)
    assert memory.stats().reply_count == 1


def test_ten_thousand_conversations_stay_within_the_bounds() -> None:
    memory = ReplyMemory(limit_bytes=50 * (ENTRY_BYTES + 20), entry_limit=1000)
    for number in range(10_000):
        answer(memory, (user(f"Question {number}"),))
    assert memory.stats().reply_count == 50 and memory.stats().size_bytes <= 50 * (ENTRY_BYTES + 20)
    assert known(memory, (user("Question 9999"), SAID)) is not None
    assert known(memory, (user("Question 9000"), SAID)) is None
    few = ReplyMemory(limit_bytes=1 << 30, entry_limit=3)
    for number in range(9):
        answer(few, (user(f"Question {number}"),))
    known(few, ())
    assert few.stats().reply_count == 3


def test_a_huge_reply_leaves_nothing_behind() -> None:
    memory = ReplyMemory(limit_bytes=4000)
    answer(memory, (user("x" * 1_000_000),), tokens=(1,) * 10_000)
    assert known(memory, (user("x" * 1_000_000), SAID)) is None
    assert (memory.stats().size_bytes, memory.stats().reply_count) == (0, 0)


def test_a_greedy_tenant_loses_its_own() -> None:
    memory = ReplyMemory(limit_bytes=20 * (ENTRY_BYTES + 20))
    answer(memory, ASKED, scope=BOB)
    for number in range(1000):
        answer(memory, (user(f"Question {number}"),), scope=ANN)
    assert known(memory, (*ASKED, SAID), BOB) is not None


def test_a_reply_is_dropped_after_those_that_build_on_it() -> None:
    """So the tokens of a reply are there as long as it is, and each is kept once."""
    memory = ReplyMemory(limit_bytes=40 * (ENTRY_BYTES + 20))
    draw = random.Random(1)
    threads: list[tuple[ChatMessage, ...]] = [(user(f"Thread {number}"),) for number in range(6)]
    expected: dict[tuple[ChatMessage, ...], tuple[int, ...]] = {}
    found_count = 0
    for step in range(600):
        index = draw.randrange(len(threads))
        asked = threads[index]
        if draw.random() < 0.1:
            asked = threads[index] = (user(f"Thread {index} anew, step {step}"),)
        found = known(memory, asked)
        if found is not None:
            assert found.token_ids == expected[asked[: found.index + 1]]
            found_count += 1
        said = assistant(f"Answer {step}")
        expected[(*asked, said)] = answer(memory, asked, said, tokens=(step,))
        threads[index] = (*asked, said, user(f"Question {step}"))
    assert found_count > 300 and memory.stats().size_bytes <= 40 * (ENTRY_BYTES + 20)


def test_a_reply_to_what_was_dropped_meanwhile_is_forgotten() -> None:
    memory = ReplyMemory(limit_bytes=1 << 20, entry_limit=2)
    answer(memory, ASKED)
    place = memory.place(Conversation((*ASKED, SAID, user("Sure?"))), ANN)
    for number in range(2):
        answer(memory, (user(f"Question {number}"),))
    memory.place(Conversation(ASKED), ANN)
    memory.remember(place, (1, 2, 3, 4, 5, 6), DRAWN, END)
    memory.place(Conversation(ASKED), ANN)
    assert memory.stats().reply_count == 2


def test_a_prompt_that_does_not_begin_as_the_reply_before_is_kept_whole() -> None:
    """The template rendered it: it was not certain what follows the reply."""
    memory = roomy()
    answer(memory, ASKED)
    asked = (*ASKED, SAID, user("Sure?"))
    place = memory.place(Conversation(asked), ANN)
    memory.remember(place, (9, 9, 9, 9, 9, 9), DRAWN, END)
    found = known(memory, (*asked, SAID, user("Why?")))
    assert found == KeptReply(4, (9, 9, 9, 9, 9, 9, 4), END)


def test_notes_are_bounded() -> None:
    """Replies that end while no prompt comes."""
    memory = roomy()
    place = ReplyPlace(Tenant("ann"), b"key")
    for number in range(2000):
        memory.remember(place, (1,), assistant(f"Answer {number}"), END)
    known(memory, ASKED)
    assert memory.stats().reply_count == 256


def test_several_threads_may_look_and_note() -> None:
    memory = ReplyMemory(limit_bytes=30 * (ENTRY_BYTES + 20))
    failures: list[BaseException] = []

    def talk(name: str) -> None:
        try:
            asked: tuple[ChatMessage, ...] = (user(name),)
            for step in range(100):
                answer(memory, asked, tokens=(step,))
                asked = (*asked, SAID, user(f"And {step}?")) if step % 9 else (user(f"{name} {step}"),)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(f"Thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and memory.stats().size_bytes <= 30 * (ENTRY_BYTES + 20)


def test_what_is_known_is_counted_and_all_of_it_can_be_forgotten() -> None:
    memory = roomy()
    answer(memory, ASKED)
    assert memory.stats() == ReplyStats()
    known(memory, (*ASKED, SAID))
    assert memory.stats() == ReplyStats(1, ENTRY_BYTES + 5 * 4, 1)
    answer(memory, ASKED, scope=BOB)
    memory.forget_all()
    assert known(memory, (*ASKED, SAID)) is known(memory, (*ASKED, SAID), BOB) is None
    assert memory.stats() == ReplyStats(0, 0, 1)
