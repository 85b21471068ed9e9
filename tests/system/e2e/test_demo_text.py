"""The demo models' own tokenizers: cut anywhere no character is split, and known texts have known ids."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from icehouse_server.demo.models import DEMO_MODELS, SMOLLM2
from icehouse_server.text.detokenizer import Detokenizer
from tokenizers import Tokenizer

from tests.fixtures.demo_models import demo_model_dir

pytestmark = pytest.mark.slow

texts = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=60)


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir(DEMO_MODELS[name]) / "tokenizer.json"))


@pytest.fixture(scope="module", params=["demo", "demo-gemma"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of(request.param)


@given(text=texts, cut=st.integers(min_value=0, max_value=100))
@example(text="naïve 🧊🫠 語 \U0001f9ca\u200d\U0001fae0 \U00012000\U00012001 end", cut=9)
def test_prompt_and_output_cut_anywhere_add_up(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(lambda some: tokenizer.decode(list(some)), ids[:cut])
    pieces = [*(detokenizer.push(token_id) for token_id in ids[cut:]), detokenizer.flush()]
    whole = tokenizer.decode(ids)
    # SmolLM2 has no token for the bytes F1 and F2, with which the planes begin that have no characters yet.
    assume("\ufffd" not in whole)
    assert whole.endswith("".join(pieces)) and not any("\ufffd" in piece for piece in pieces)
    if cut == 0:
        assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello, world!  Two  spaces\n\n\ttab", [19556, 28, 905, 17, 216, 5713, 216, 5600, 1116, 197, 15999]),
        (
            "2026 is 45 squared plus 1; 3.14",
            [34, 32, 34, 38, 314, 216, 36, 37, 27402, 8055, 216, 33, 43, 216, 35, 30, 33, 36],
        ),
        ("١٢ ½", [164, 111, 164, 112, 216, 16738]),
        ("naïve café Straße", [3546, 46494, 37366, 19144, 34878, 85]),
        ("氷は冷たい", [177, 125, 132, 7365, 124, 33031, 132, 7365, 249, 41679]),
        (
            "🧊 \U0001f636\u200d\U0001f32b\ufe0f",
            [10813, 117, 228, 40303, 131, 321, 231, 10813, 230, 121, 31752],
        ),
        ("I've said it's 'D We'Ve", [57, 3543, 1137, 357, 506, 637, 52, 1046, 23, 25917]),
        ("    def f(x):\n        return x**2", [333, 753, 275, 24, 104, 727, 448, 1003, 1792, 828, 34]),
        ("<|im_start|>user\nHi<|im_end|>\n<|endoftext|>", [1, 4093, 198, 26843, 2, 198, 0]),
        ("<|im_start |> <repo_name>x", [44, 108, 306, 79, 3738, 2504, 46, 216, 3, 104]),
    ],
)
def test_the_smollm2_tokenizer_gives_the_ids_of_the_published_one(text: str, ids: list[int]) -> None:
    """Its ids of llama.cpp's own test text also had the SHA-256 by which that knows "smollm"."""
    tokenizer = tokenizer_of(SMOLLM2.name)
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
