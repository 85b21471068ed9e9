"""Long texts are tokenized as short ones are, but without Python's global lock."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer
from icehouse_server.text.tokenizer import Tokenizer

from tests.fixtures.models import tiny_model_dir


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tiny_model_dir(tmp_path_factory.mktemp("tokenizer"), "llama")
    return load_tokenizer(ModelSource(path=path, model_id="tiny"))


@pytest.mark.parametrize("length", [1, 4096, 4097, 20_000])
def test_the_length_changes_nothing(tokenizer: Any, length: int) -> None:
    text = ("the quick brown fox <|im_end|> " * 1000)[:length]
    fast = tokenizer._wrapper.backend_tokenizer
    assert tokenizer.encode(text) == fast.encode(text).ids
    assert tokenizer.spell(text) == fast.encode(text, add_special_tokens=False).ids


def test_others_run_while_a_long_text_is_tokenized(tokenizer: Any) -> None:
    text = "the quick brown fox " * 100_000
    turns, done = 0, threading.Event()

    def work() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    # With the lock held all the while this loop would get a turn or two: before and after.
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def test_the_longest_token_is_known(tokenizer: Any) -> None:
    vocabulary = tokenizer._wrapper.get_vocab()
    assert tokenizer.longest_token_bytes == max(len(token.encode()) for token in vocabulary)


class _SlowWrapper:
    """A tokenizer without a fast one behind it, which raises for ids that it does not know, as those do that
    are sentencepiece's or tiktoken's."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self._wrapper, name)

    def __len__(self) -> int:
        return len(self._wrapper)

    def decode(self, token_ids: list[int], **how: Any) -> str:
        self.convert_ids_to_tokens(max(token_ids, default=0))
        return str(self._wrapper.decode(token_ids, **how))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        if token_id >= len(self):
            raise IndexError("piece id is out of range")
        return str(self._wrapper.convert_ids_to_tokens(token_id))


def test_a_slow_tokenizer_passes_over_ids_that_only_the_models_table_has(tokenizer: Any) -> None:
    """Anybody may send such an id, and a model may draw it."""
    slow = Tokenizer(_SlowWrapper(tokenizer._wrapper))
    ids, unknown = tokenizer.spell("the quick brown fox"), tokenizer.vocabulary_size + 7
    for decode, fast in (
        (slow.decode, tokenizer.decode),
        (slow.decode_with_markers, tokenizer.decode_with_markers),
    ):
        assert decode([*ids[:2], unknown, *ids[2:]]) == fast([*ids[:2], unknown, *ids[2:]]) == fast(ids)
        assert decode([unknown]) == ""
    assert slow.piece(unknown) == "" and slow.piece(ids[0]) == tokenizer.piece(ids[0])
