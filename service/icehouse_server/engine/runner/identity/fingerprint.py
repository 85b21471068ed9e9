"""Fingerprint of a served model: SHA-256 over everything that its KV depends on, cheap at every start.

Every byte of the weights counts: changing one number in a file makes another model. Digests of files are kept
in a book beside the blocks (`DigestBook`), so that only new files are read. Requantizing, fine-tuning or
fusing an adapter changes the fingerprint; moving, renaming or copying the folder does not. The code that
computes KV counts, too (`KvCode`).

Without a book, when nothing outlives the process, weights are sampled: the size of each file, and pieces all
over it. A process has one model, whose adapters are distinguished by all their bytes (`adapter_digest`). A
draft model does not count: its caches are never stored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from icehouse_server.domain.blocks import LAYOUT_ABI
from icehouse_server.domain.ids import AdapterDigest, Fingerprint
from icehouse_server.engine.runner.identity.kv_code import KvCode, adapter_code_digest, kv_code
from icehouse_server.engine.runner.vision import mlx_vlm
from icehouse_server.errors import model_invalid
from icehouse_server.storage.digests import DigestBook
from icehouse_server.storage.storage_settings import CODE_DETAIL
from icehouse_server.text.tokenizer_archive import tokenizer_digest_hex

_SAMPLED_TAG: Final = b"icehouse.fingerprint.v1\x00"
_TAG: Final = b"icehouse.fingerprint.v3\x00"
_ADAPTER_TAG: Final = b"icehouse.adapter.v2\x00"
_SYSTEM_TAG: Final = b"icehouse.system.v1\x00"
_COMPUTING: Final = ("icehouse", "mlx", "mlx-lm", "tokenizers", "transformers", "llguidance")
"""Distributions whose release may change an output."""
_PLACING_KEYS: Final = ("fine_tune_type", "num_layers", "lora_parameters")
"""Keys of adapter_config.json that say what the adapter computes; the others say how it was trained."""
_NAMES_IN_CONFIG: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Keys of config.json that say where a model came from, not what it computes."""

_SAMPLE_COUNT: Final = 512
_SAMPLE_BYTES: Final = 1024
"""Samples of a file that is not read whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """A fingerprint and the human-readable facts in it."""

    value: Fingerprint
    details: dict[str, str]
    code: KvCode
    """The code that it covers, to be compared with the loaded code."""


def model_fingerprint(
    model_dir: Path,
    *,
    dtype: str,
    kv_format: str,
    block_token_count: int,
    adapter_dir: Path | None = None,
    book: DigestBook | None = None,
) -> ModelFingerprint:
    """Fingerprint a model folder as it would be served now.

    `dtype` is what the weights are loaded as, `kv_format` how KV is kept ("bfloat16", "affine 4-bit, group
    64"), `book` the known digests of weight files. Raises ModelError if the folder has no readable config or
    weights.
    """
    config = read_json(model_dir / "config.json")
    shards = sorted(model_dir.glob("model*.safetensors"))
    if not shards:
        raise model_invalid(f"{model_dir} has no model*.safetensors; convert the model to MLX first")
    code = kv_code(model_dir, config, has_adapter=adapter_dir is not None)
    quant_config = model_dir / "hf_quant_config.json"
    digest_of = _sampled_digest if book is None else functools.partial(_whole_digest, book=book)
    facts = {
        "config": _without_names(config),
        "quant_config": _without_names(read_json(quant_config)) if quant_config.exists() else None,
        "code": dict(code.digests),
        # Sorted by content, so that the names of shards do not matter.
        "shards": sorted(map(digest_of, shards)),
        "adapter": _adapter_facts(adapter_dir, digest_of),
        "dtype": dtype,
        "kv_format": kv_format,
        "block_token_count": block_token_count,
        "layout_abi": LAYOUT_ABI,
        # Nothing else is served; without these keys, every block on an SSD would be another model's.
        "layout": "",
        "world": [1, 0],
    }
    if mlx_vlm.is_used(model_dir, config):
        # It rounds differently from mlx-lm, which reads some of the same folders.
        facts["reader"] = "mlx-vlm"
    details = {
        "architecture": str(config.get("model_type", "unknown")),
        "quantization": quantization_of(config),
        "dtype": dtype,
        "kv_format": kv_format,
        "weight_bytes": str(sum(shard.stat().st_size for shard in shards)),
        "shards": str(len(shards)),
        "adapter": "none" if adapter_dir is None else _digest(facts["adapter"])[:12],
        "block_tokens": str(block_token_count),
        "layout_abi": str(LAYOUT_ABI),
        # Earlier directories have this key; if it were missing, a change would not be put down to the code.
        "rank": "0 of 1",
        **{CODE_DETAIL + name: digest for name, digest in code.digests.items()},
    }
    tag = _SAMPLED_TAG
    if book is not None:
        tag = _TAG
        book.save()
        details["weights"] = _digest(facts["shards"])[:12]
    return ModelFingerprint(Fingerprint(hashlib.sha256(tag + _canonical(facts)).digest()), details, code)


def system_digest_hex(model_dir: Path, *, fingerprint_hex: str, device: str) -> str:
    """Return the SHA-256 of everything that outputs depend on: the model, the tokenizer, the device and the
    releases of all packages that compute. Raises ModelError if the tokenizer's files cannot be read."""
    facts = {
        "model": fingerprint_hex,
        "tokenizer": tokenizer_digest_hex(model_dir),
        "device": device,
        "releases": {name: _release(name) for name in _COMPUTING},
    }
    return hashlib.sha256(_SYSTEM_TAG + _canonical(facts)).hexdigest()


@functools.cache
def _release(name: str) -> str:
    """Return the release of an installed distribution; "" if it runs from source."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def adapter_digest(adapter_dir: Path) -> AdapterDigest:
    """Digest what an adapter computes: all its weights, the part of its config that places them, and the code
    of its layers.

    Every byte is read, at each start: adapters are small, and are more often replaced in place. Raises
    ModelError if the folder has no readable config or weights.
    """
    config = read_json(adapter_dir / "adapter_config.json")
    placed = {key: config.get(key) for key in _PLACING_KEYS}
    path = adapter_dir / "adapters.safetensors"
    try:
        with path.open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise model_invalid(f"{path} cannot be read: {error.strerror}") from error
    facts = {"placed": placed, "code": adapter_code_digest()}
    return AdapterDigest(hashlib.sha256(_ADAPTER_TAG + weights + _canonical(facts)).digest())


def _adapter_facts(adapter_dir: Path | None, digest_of: Callable[[Path], str]) -> Any:
    if adapter_dir is None:
        return None
    weights = sorted(adapter_dir.glob("adapters*.safetensors"))
    if not weights:
        raise model_invalid(f"Adapter {adapter_dir} has no adapters.safetensors")
    config = _without_names(read_json(adapter_dir / "adapter_config.json"))
    return {"config": config, "weights": sorted(digest_of(file) for file in weights)}


def _whole_digest(path: Path, *, book: DigestBook) -> str:
    try:
        return book.digest(str(path))
    except OSError as error:
        raise model_invalid(f"{path} cannot be read: {error}") from error


def _sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's size and of pieces all over it; all of a short file is read."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size_bytes.to_bytes(8, "little"))
        for start in range(0, size_bytes, max(_SAMPLE_BYTES, size_bytes // _SAMPLE_COUNT)):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return in words how config.json says that weights are quantized; "none" if it does not."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict):
        return "none"
    bits, group_size = quantization.get("bits"), quantization.get("group_size")
    if bits is None:
        return str(quantization.get("quant_method", "unknown"))
    return f"{bits}-bit, group {group_size}"


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items() if key not in _NAMES_IN_CONFIG}
    return [_without_names(item) for item in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value)).hexdigest()


def read_json(path: Path, *, missing: str = "") -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError, with the message `missing` if there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        is_missing = missing and isinstance(error, FileNotFoundError)
        raise model_invalid(missing if is_missing else f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise model_invalid(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise model_invalid(f"{path} does not hold a JSON object")
    return value
