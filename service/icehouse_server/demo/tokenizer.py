"""Gemma tokenizer from the vocabulary that a GGUF file carries.

GGUF lists pieces and their kinds but no merges. Gemma's pieces stand in the order in which they were
merged, so every way to cut a piece into two known pieces is a merge with that piece's rank
(SentencePiece's BPE, https://github.com/google/sentencepiece).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPACE = "\u2581"
"""How a piece spells a space."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set first = 0 -%}
{%- set preface = namespace(text='') -%}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set first = 1 -%}
{%- set preface.text = messages[0]['content'] | trim + '\\n\\n' -%}
{%- endif -%}
{%- if tools -%}
{%- set preface.text = preface.text + 'Functions:\\n' -%}
{%- for tool in tools -%}
{%- set preface.text = preface.text + (tool['function'] | tojson) + '\\n' -%}
{%- endfor -%}
{%- set form = '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -%}
{%- set preface.text = preface.text + 'To call one, write\\n' + form + '\\n\\n' -%}
{%- endif -%}
{%- for message in messages[first:] -%}
{%- if message['role'] not in ('user', 'assistant', 'model', 'tool') -%}
{{- raise_exception('the roles are system (first only), user, assistant and tool, not ' + message['role']) -}}
{%- endif -%}
{{- '<start_of_turn>' + ('user' if message['role'] in ('user', 'tool') else 'model') + '\\n' -}}
{%- if loop.first -%}{{- preface.text -}}{%- endif -%}
{%- if message['role'] == 'tool' -%}
{{- '<tool_response>\\n' + message['content'] | trim + '\\n</tool_response>' -}}
{%- else -%}
{{- message['content'] | trim -}}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set tool_call = call['function'] -%}
{{- '\\n' if message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{{- (tool_call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
"""Gemma's public turn format, with tools in the manner of other families.

The base model was trained on neither, but chat requests work.
"""


class PieceKind(enum.IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer. `pieces` and `kinds` are indexed by token id."""

    pieces: Sequence[str]
    kinds: Sequence[int]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    tokenizer = make_tokenizer(vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.pieces[vocabulary.bos_id],
        "eos_token": vocabulary.pieces[vocabulary.eos_id],
        "unk_token": vocabulary.pieces[vocabulary.unknown_id],
        "pad_token": vocabulary.pieces[vocabulary.padding_id],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    renew_template(folder)


def renew_template(folder: Path) -> None:
    """Write the chat template where it is missing or an older one. It is no reason to build a model anew."""
    file = folder / "chat_template.jinja"
    if not file.exists() or file.read_text(encoding="utf-8") != CHAT_TEMPLATE:
        fresh = file.with_suffix(".fresh")
        fresh.write_text(CHAT_TEMPLATE, encoding="utf-8")
        fresh.replace(file)


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return a byte-fallback BPE tokenizer that puts `<bos>` before every text."""
    pieces = [_respell(piece, kind) for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)]
    ids = {piece: index for index, piece in enumerate(pieces)}
    unknown = pieces[vocabulary.unknown_id]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=find_merges(pieces, vocabulary.kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = pieces[vocabulary.bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.bos_id)]
    )
    kinds = list(zip(pieces, vocabulary.kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True, normalized=False) for p, k in kinds if k == PieceKind.CONTROL]
    )
    # User-defined pieces win over merges. Normalized, because runs of spaces are matched as runs of SPACE.
    tokenizer.add_tokens([AddedToken(p, normalized=True) for p, k in kinds if k == PieceKind.USER_DEFINED])
    return tokenizer


def find_merges(pieces: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges in rank order: for each normal piece, each cut into two normal pieces."""
    normal = {
        piece: i
        for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind == PieceKind.NORMAL
    }
    merges: list[tuple[str, str]] = []
    for piece in normal:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [cut for cut in cuts if cut[0] in normal and cut[1] in normal]
        merges.extend(sorted(known, key=lambda cut: (normal[cut[0]], normal[cut[1]])))
    return merges


def _respell(piece: str, kind: int) -> str:
    """Spell runs of spaces as the normalizer does; GGUF stores them plain."""
    return piece.replace(" ", SPACE) if kind == PieceKind.USER_DEFINED else piece
