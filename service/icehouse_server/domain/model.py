"""Model facts: what is told of a loaded model and its adapters, and the state of the engine."""

from __future__ import annotations

import dataclasses
import enum
import hashlib

from icehouse_server.domain.ids import AdapterDigest, AdapterName


class EngineState(enum.Enum):
    """The engine's life, in order; FAILED can follow any."""

    LOADING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    STOPPED = enum.auto()
    FAILED = enum.auto()


class PassSplit(enum.Enum):
    """Where sequences that share a forward pass are kept apart."""

    ATTENTION = "attention"
    MODULE = "module"
    """The module of a layer that keeps its state."""
    ALONE = "alone"
    """They share no pass."""


class Sight(enum.Enum):
    """What is served of a model folder's images, by whether the extra `vision` is installed."""

    NONE = enum.auto()
    """It has no vision tower that is known here."""
    SERVED = enum.auto()
    TEXT_ONLY = enum.auto()
    """The extra is missing: images are refused."""
    UNREADABLE = enum.auto()
    """The extra is missing, and without it not even the text can be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormatInfo:
    """How a model's chat replies are read, as `ModelService` shows it. Strings are empty for what is not
    known."""

    calls: str
    """The notation of its tool calls."""
    reasoning_start: str
    reasoning_end: str
    evidence: tuple[str, ...]
    """What both were found by, in words."""
    unread_markers: tuple[str, ...] = ()
    """Tokens that look like marks of reasoning or calls and that nothing reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded model, as `ModelService` shows it. Sizes in bytes."""

    model_id: str
    """The name callers use in `model`; the empty name means this model too."""
    architecture: str
    """`model_type` of config.json."""
    vocabulary_size: int
    context_token_limit: int
    """Prompt plus output may not be longer than this."""
    dtype: str
    quantization: str
    """"none" or, say, "4-bit, group 64"."""
    parameter_count: int
    weight_bytes: int
    kv_bytes_per_token: int
    """KV growth per token over all layers whose context is unlimited; 0 when unknown."""
    cache_classes: tuple[str, ...]
    """Distinct cache class names of the model's layers, in order of first appearance."""
    fingerprint_hex: str
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    device: str
    sees_images: bool = False
    """Whether prompts may have images in them."""
    image_refusal: str = "reads text alone"
    """What is said of the model to who sends one where they may not."""
    runs_images_whole: bool = False
    """Each token of an image sees all of it, so no pass ends inside one."""
    pass_splits: tuple[PassSplit, ...] = ()
    """In the order of their names."""
    embedding_size: int = 0
    """Width of the hidden states that embeddings are made of; 0 where the model shows none."""
    adapters: tuple[AdapterInfo, ...] = ()
    """What requests may name in `adapter`, in the config's order."""
    reply_format: ReplyFormatInfo | None = None
    """None without a chat template."""
    system_digest_hex: str = ""
    """Of what outputs depend on beside the request and its adapter."""

    def system_fingerprint(self, adapter: AdapterName) -> str:
        """Return what outputs with an adapter depend on beside the request, as 16 hex digits."""
        digests = (each.digest for each in self.adapters if each.name == adapter)
        parts = bytes.fromhex(self.system_digest_hex) + b"".join(digests)
        return hashlib.sha256(parts).hexdigest()[:16]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights, those of the adapters included."""
        return self.weight_bytes + sum(adapter.weight_bytes for adapter in self.adapters)


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One loaded adapter, as `ModelService` shows it."""

    name: AdapterName
    """The name callers use in `adapter`."""
    kind: str
    """`fine_tune_type` of its adapter_config.json: "lora", "dora" or "full"."""
    digest: AdapterDigest
    parameter_count: int
    weight_bytes: int
    """What it takes beside the model's weights, which are not held twice."""
