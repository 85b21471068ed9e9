"""Files of an MLX folder: what is written, and when it is written again; rounding of weights."""

import json
from pathlib import Path

import numpy as np
import safetensors
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.demo.mlx_folder import Array, renew_template, to_bfloat16, write_tokenizer, write_weights
from tokenizers import Tokenizer, models

METADATA = {
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}


@given(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32))
def test_bfloat16_is_the_nearest_one(number: float) -> None:
    bits = int(to_bfloat16(np.array([number], np.float32))[0])

    def value(pattern: int) -> float:
        return float(np.array([pattern << 16], np.uint32).view(np.float32)[0])

    distance = abs(value(bits) - number)
    assert distance <= abs(value(bits + 1) - number)
    assert (bits & 0x7FFF) == 0 or distance <= abs(value(bits - 1) - number)


def test_bfloat16_ties_go_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert to_bfloat16(halfway).tolist() == [0x3F80, 0x3F82]


def test_the_file_has_what_the_conversion_says(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_tensor("one", np.array([1.5, 3.0], np.float32))
    writer.add_tensor("other", np.array([[1.5, 3.0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    progress: list[float] = []
    file = tmp_path / "model.safetensors"

    def convert(name: str, values: Array) -> tuple[str, Array]:
        return f"model.{name}", values * len(name)

    tensors = GGUFReader(tmp_path / "source.gguf").tensors
    write_weights(tensors, file, convert=convert, on_progress=progress.append)
    stored = {
        name: (info["dtype"], info["shape"], info["data"])
        for name, info in safetensors.deserialize(file.read_bytes())
    }
    assert stored == {
        "model.one": ("BF16", [2], _bfloat16_bytes(4.5, 9.0)),
        "model.other": ("BF16", [1, 2], _bfloat16_bytes(7.5, 15.0)),
    }
    assert progress == [0.5, 1.0]


def _bfloat16_bytes(*numbers: float) -> bytes:
    """Bytes of numbers that bfloat16 holds exactly: the upper halves of their float32 form."""
    return (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def test_the_files_name_the_special_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(Tokenizer(models.BPE(vocab={"a": 3}, merges=[])), METADATA, tmp_path)
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
