"""Reasoning ends where its budget does, and a form begins behind it."""

from __future__ import annotations

import dataclasses

import numpy as np
from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.domain.response_format import Choice, Grammar, JsonTag, TaggedJson
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.structured_output.reasoning_budget import (
    FormScope,
    ReasoningBudget,
    ReasoningConstraint,
)

from tests.fixtures.chat.families import THINKING, WEATHER, tokenizer_of, turns

TOKENIZER = tokenizer_of(THINKING)
SIZE = TOKENIZER.vocabulary_size
COMPILER = GrammarCompiler(TOKENIZER, vocabulary_size=SIZE, cache_limit=4)
(THINK,), (UNTHINK,), (EOS,) = (
    TOKENIZER.spell("<think>"),
    TOKENIZER.spell("</think>"),
    TOKENIZER.eos_token_ids,
)
WORD, OTHER = TOKENIZER.spell("why so")[:2]
YES = TOKENIZER.spell("yes")


def budget(
    limit: int | None,
    *,
    form: Grammar | None = None,
    scope: FormScope = FormScope.WHOLE,
    is_open: bool = False,
    reads_calls: bool = False,
) -> ReasoningBudget:
    conversation = Conversation(turns(("user", "Hi")), tools=(WEATHER,) if reads_calls else ())
    reasoning = TOKENIZER.reply_reasoning(conversation, RenderedChat((), is_reasoning=is_open))
    assert reasoning is not None
    return ReasoningBudget(
        reasoning=reasoning,
        token_limit=limit,
        form=form,
        scope=scope,
        decode=TOKENIZER.decode_with_markers,
        prompt_token_ids=tuple(TOKENIZER.spell("Hi")),
        end_token_ids=TOKENIZER.eos_token_ids,
        vocabulary_size=SIZE,
    )


def yes(limit: int | None, *, is_open: bool = False) -> ReasoningConstraint:
    form = COMPILER.compile(Choice(("yes",)))
    return budget(limit, form=form, scope=FormScope.ANSWER, is_open=is_open).start()


def allowed(constraint: ReasoningConstraint) -> set[int]:
    """Return the tokens that may come next, as both ways of asking say."""
    if constraint.allows_any:
        return set(range(SIZE))
    bits = np.unpackbits(constraint.allowed_tokens().view(np.uint8), bitorder="little")[:SIZE]
    found = set(np.flatnonzero(bits).tolist())
    assert found <= {token_id for token_id in range(SIZE) if constraint.allows(token_id)}
    return found


def draw(constraint: ReasoningConstraint, *token_ids: int) -> ReasoningConstraint:
    for token_id in token_ids:
        assert constraint.allows(token_id), (token_id, token_ids)
        constraint.accept(token_id)
    return constraint


def test_the_end_marker_is_all_that_may_come_when_the_budget_is_spent() -> None:
    constraint = budget(2).start()
    assert constraint.allows_any
    assert draw(constraint, WORD, THINK, WORD).allows_any
    assert allowed(draw(constraint, OTHER)) == {UNTHINK} and not constraint.allows(WORD)
    assert draw(constraint, UNTHINK, WORD, WORD, WORD).allows_any
    assert allowed(draw(constraint, THINK)) == {UNTHINK}, "what begins again is closed at once"
    assert not constraint.is_finished and constraint.error is None


def test_a_budget_of_nothing_closes_what_the_prompt_or_the_model_opens() -> None:
    assert allowed(budget(0, is_open=True).start()) == {UNTHINK}
    assert allowed(draw(budget(0).start(), THINK)) == {UNTHINK}


def test_a_model_that_ends_its_reasoning_itself_is_left_alone() -> None:
    constraint = draw(budget(3, is_open=True).start(), WORD, UNTHINK, *[OTHER] * 9)
    assert constraint.allows_any and constraint.allows(EOS)


def test_a_fresh_constraint_goes_on_from_what_was_drawn() -> None:
    grammar = budget(2, is_open=True)
    for drawn in ([], [WORD], [WORD, OTHER], [WORD, OTHER, UNTHINK], [WORD, OTHER, UNTHINK, WORD]):
        assert allowed(draw(grammar.start(), *drawn)) == allowed(draw(grammar.start(), *drawn))
    assert allowed(draw(grammar.start(), WORD, OTHER)) == {UNTHINK}


def test_a_form_begins_behind_the_reasoning_that_the_prompt_opens() -> None:
    for limit in (None, 2):
        constraint = yes(limit, is_open=True)
        assert allowed(constraint) == set(range(SIZE)) - {EOS}, "an output without its form is none"
        draw(constraint, WORD, *([] if limit is None else [OTHER]), UNTHINK)
        assert allowed(constraint) <= {i for i in range(SIZE) if "yes".startswith(TOKENIZER.decode([i]))}
        assert draw(constraint, *YES).is_finished


def test_before_a_form_a_model_may_begin_to_reason_if_it_has_a_budget() -> None:
    first = allowed(yes(2))
    assert THINK in first and YES[0] in first and WORD not in first
    constraint = draw(yes(2), THINK, WORD, OTHER)
    assert allowed(constraint) == {UNTHINK}
    assert draw(constraint, UNTHINK, *YES).is_finished
    assert draw(yes(2), *YES).is_finished
    assert THINK not in allowed(draw(yes(2), YES[0])) and THINK not in allowed(yes(0))


def test_a_form_of_the_whole_output_has_the_last_word() -> None:
    tag = JsonTag("<tool_call>", '{"type": "object"}', "</tool_call>")
    form = COMPILER.compile(TaggedJson((tag,), trigger="<tool_call>", markers=("<think>", "</think>")))
    constraint = budget(1, form=form, reads_calls=True).start()
    (call,) = TOKENIZER.spell("<tool_call>")
    assert allowed(draw(constraint, THINK, WORD)) == {UNTHINK}
    draw(constraint, UNTHINK, WORD, call)
    assert WORD not in allowed(constraint) and not constraint.allows_any
    other = COMPILER.compile(Choice(("<think>why so",)))
    spelled = [token_id for text in ("<", "think>", "why") for token_id in TOKENIZER.spell(text)]
    bound = draw(budget(1, form=other).start(), *spelled)
    assert UNTHINK not in allowed(bound) and allowed(bound)


def test_an_end_token_behind_the_models_table_holds_nothing_up() -> None:
    """Folders name such, of a vocabulary that was cut."""
    form = COMPILER.compile(Choice(("yes",)))
    asked = budget(None, form=form, scope=FormScope.ANSWER, is_open=True)
    constraint = dataclasses.replace(asked, end_token_ids=(EOS, SIZE + 1000)).start()
    assert {*range(SIZE)} - allowed(constraint) == {EOS}
