"""Long texts are tokenized as short ones are, but without Python's global lock."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer

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
