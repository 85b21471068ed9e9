"""Files of a tokenizer: what is written, and when it is written again."""

import json
from pathlib import Path

from icehouse_server.demo.tokenizer import read_vocabulary, renew_template, write_tokenizer
from tokenizers import Tokenizer, models

METADATA = {
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}


def test_the_files_name_the_special_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(METADATA)
    assert vocabulary.merges == ()
    write_tokenizer(Tokenizer(models.BPE(vocab={"a": 3}, merges=[])), vocabulary, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [config[f"{name}_token"] for name in ("bos", "eos", "unk", "pad")]
    assert named == ["<s>", "</s>", "<unk>", "</s>"]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == [3]


def test_an_older_template_is_renewed_and_a_fresh_one_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    for old in (None, "old"):
        if old is not None:
            file.write_text(old)
        renew_template(tmp_path, "new")
        assert file.read_text() == "new"
    written = file.stat().st_ino
    renew_template(tmp_path, "new")
    assert file.stat().st_ino == written and list(tmp_path.iterdir()) == [file]
