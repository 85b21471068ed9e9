"""A byte-level BPE tokenizer of 320 tokens, built without training so that ids never change.

Any text round-trips: all 256 bytes are tokens. Ids 0-4 are the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))
VOCABULARY_SIZE: Final = 320

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# "Ġ" is how byte-level BPE spells a space.
_MERGES: Final = """
t h|th e|i n|e r|a n|r e|o n|a t|e n|o r|Ġ t|Ġt h|Ġth e|Ġ a|Ġ s|Ġ w|Ġ o|Ġ c|Ġ b|Ġ f|Ġ p|Ġ d|Ġ h|Ġ m|Ġ l|Ġ i
Ġo f|Ġa n|Ġan d|in g|Ġ in|Ġt o|e d|i s
i t|a r|a l|o u|e s|l l|s t|l e|v e|o m|r o|n d|n t|i c|a s|c h|s e|Ġ e|Ġ g|Ġ r|Ġw h|i on|en t
"""


def tokenizer() -> Tokenizer:
    """Return the tokenizer; `encode` puts `<bos>` in front unless told not to."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for line in _MERGES.replace("\n", "|").split("|"):
        if not line:
            continue
        left, right = line.split(" ")
        merges.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    assert len(vocabulary) <= VOCABULARY_SIZE, len(vocabulary)
    for filler in range(VOCABULARY_SIZE - len(vocabulary)):
        merges.append((chr(ord("A") + filler), "e"))
        vocabulary[f"{chr(ord('A') + filler)}e"] = len(vocabulary)

    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert built.get_vocab_size() == VOCABULARY_SIZE, built.get_vocab_size()
    return built


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer in the style of SentencePiece: "▁" for a space, bytes for what has no piece.

    As with Llama 2 the decoder strips one space from the front of whatever it is given.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "th", "the", "▁t", "▁th", "▁the", "in", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("▁", "a")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    built = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return built


def write_tokenizer(
    folder: Path,
    *,
    context_token_limit: int,
    chat_template: bool,
    added: Sequence[tuple[str, bool]] = (),
) -> None:
    """Write tokenizer.json and tokenizer_config.json; `added` tokens, special or not, come last."""
    built = tokenizer()
    built.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added])
    built.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "additional_special_tokens": [SPECIAL_TOKENS[TURN_START_ID], SPECIAL_TOKENS[TURN_END_ID]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_token_limit,
    }
    if chat_template:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
