"""The demo model's own tokenizer (262,144 pieces, bytes for the rest) cut anywhere: no character is split."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from icehouse_server.demo.build import demo_model_folder, is_built
from icehouse_server.text.detokenizer import Detokenizer
from tokenizers import Tokenizer

pytestmark = pytest.mark.skipif(not is_built(demo_model_folder()), reason="the demo model was not made yet")

texts = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_folder() / "tokenizer.json"))


@given(text=texts, cut=st.integers(min_value=0, max_value=100))
@example(text="naïve 🧊🫠 語 \U0001f9ca\u200d\U0001fae0 \U00012000\U00012001 end", cut=9)
def test_prompt_and_output_cut_anywhere_add_up(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(lambda some: tokenizer.decode(list(some)), ids[:cut])
    pieces = [*(detokenizer.push(token_id) for token_id in ids[cut:]), detokenizer.flush()]
    whole = tokenizer.decode(ids)
    assert whole.endswith("".join(pieces)) and not any("\ufffd" in piece for piece in pieces)
    if cut == 0:
        assert "".join(pieces) == whole
