"""A gap becomes the prompt that its model was trained on, whichever of the known names its tokens have."""

from __future__ import annotations

import pytest
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.infill import infill_format_of

from tests.fixtures.chat.families import THINKING, tokenizer_of
from tests.fixtures.models.chat_templates import Family
from tests.fixtures.models.vocabulary import BOS_ID, byte_fallback_tokenizer

CODER = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>", "<|endoftext|>")


def coder(*tokens: str) -> Family:
    return Family(THINKING.template, tuple((token, True) for token in tokens))


@pytest.mark.parametrize(
    ("names", "stops"),
    [
        (CODER, CODER),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"), None),
        (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), None),
        (("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"), None),
        (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), None),
    ],
    ids=["Qwen2.5-Coder", "StarCoder", "SantaCoder", "DeepSeek-Coder", "CodeLlama"],
)
def test_prefix_suffix_middle(names: tuple[str, ...], stops: tuple[str, ...] | None) -> None:
    tokenizer = tokenizer_of(coder(*names))
    (prefix,), (middle,), (suffix,) = (tokenizer.spell(name) for name in names[:3])
    found = tokenizer.render_infill(prefix="def f", suffix=" + 1\n")
    before, behind = tokenizer.spell("def f"), tokenizer.spell(" + 1\n")
    assert found.token_ids == (BOS_ID, prefix, *before, suffix, *behind, middle)
    spelled = {tokenizer.piece(token_id) for token_id in found.stop_token_ids}
    assert spelled == set(stops or names) and len(found.stop_token_ids) == len(spelled)
    empty = tokenizer.render_infill(prefix="", suffix="a")
    assert empty.token_ids == (BOS_ID, prefix, suffix, *tokenizer.spell("a"), middle)


def test_a_vocabulary_without_such_tokens_is_refused_with_the_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer_of(THINKING).render_infill(prefix="a", suffix="b")
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "prompt.infill")
    half = {"<|fim_prefix|>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
    assert infill_format_of(half, encode=lambda text: [], start=()) is None


def test_a_suffix_gets_no_space_of_the_tokenizers_own() -> None:
    built = byte_fallback_tokenizer()
    size = built.get_vocab_size()
    vocabulary = built.get_vocab() | {"▁<PRE>": size, "▁<SUF>": size + 1, "▁<MID>": size + 2}

    def encode(text: str) -> list[int]:
        return list(built.encode(text, add_special_tokens=False).ids)

    found = infill_format_of(vocabulary, encode=encode, start=(1,))
    assert found is not None
    tokens = found.tokens(prefix="the", suffix="the").token_ids
    assert [built.id_to_token(i) for i in tokens[2:-1] if i < size] == ["▁", "the", "the"]
