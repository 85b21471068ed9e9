"""Model facts: descriptions of a loaded model and its adapters, and the state of the engine."""

from __future__ import annotations

import dataclasses
import enum
import hashlib

from icehouse_server.domain.ids import AdapterDigest, AdapterName
from icehouse_server.domain.request import Pooling


class EngineState(enum.Enum):
    """The engine's life, in order; FAILED can follow any."""

    LOADING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    STOPPED = enum.auto()
    FAILED = enum.auto()


class ModelState(enum.Enum):
    """Where a model of the pool is; FAILED can follow any of the others."""

    ABSENT = enum.auto()
    """It is loaded when it is asked for."""
    FETCHING = enum.auto()
    """Its files are looked for, or downloaded."""
    LOADING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    """What runs ends, and then it leaves memory."""
    FAILED = enum.auto()
    """It could not be loaded, or its engine failed; it is tried again when it is asked for."""


class ModelKind(enum.Enum):
    """What a model is for."""

    CHAT = enum.auto()
    """It continues texts; its hidden states and first tokens serve embeddings and reranking too."""
    EMBEDDING = enum.auto()
    RERANK = enum.auto()
    """It has a head that scores pairs of texts."""


class PassSplit(enum.Enum):
    """Where the sequences of a forward pass are split."""

    ATTENTION = "attention"
    MODULE = "module"
    """The module of a layer that keeps its state."""
    ALONE = "alone"
    """They share no pass."""


class Sight(enum.Enum):
    """Whether images are served for a model folder, with or without the extra `vision`."""

    NONE = enum.auto()
    """It has no vision tower that is known here."""
    SERVED = enum.auto()
    TEXT_ONLY = enum.auto()
    """The extra is missing: images are refused."""
    UNREADABLE = enum.auto()
    """The extra is missing, and without it the model cannot be loaded at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormatInfo:
    """How a model's chat replies are read, as `ModelService` shows it. Strings are empty where unknown."""

    calls: str
    """The notation of its tool calls."""
    reasoning_start: str
    reasoning_end: str
    evidence: tuple[str, ...]
    """How both were recognized, in words."""
    unread_markers: tuple[str, ...] = ()
    """Tokens that look like markers of reasoning or calls, but are not read as such."""


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
    """Whether prompts may contain images."""
    image_refusal: str = "reads text alone"
    """The error's description of the model if they may not."""
    runs_images_whole: bool = False
    """Each token of an image attends to all of it, so no pass ends inside an image."""
    pass_splits: tuple[PassSplit, ...] = ()
    """In the order of their names."""
    embedding_size: int = 0
    """Width of the hidden states that embeddings are made of; 0 for models without embeddings."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Adapters that requests may name, in the config's order."""
    reply_format: ReplyFormatInfo | None = None
    """None without a chat template."""
    kind: ModelKind = ModelKind.CHAT
    pooling: Pooling = Pooling.LAST_TOKEN
    """How hidden states become a vector where a request does not say."""
    embedding_prompts: tuple[EmbeddingPrompt, ...] = ()
    """Texts before an input that the model was trained with; requests may name one."""
    system_digest_hex: str = ""
    """Digest of all that outputs depend on, except the request and its adapter."""

    def system_fingerprint(self, adapter: AdapterName) -> str:
        """Return a digest of all that outputs depend on, except the request, as 16 hex digits."""
        digests = (each.digest for each in self.adapters if each.name == adapter)
        parts = bytes.fromhex(self.system_digest_hex) + b"".join(digests)
        return hashlib.sha256(parts).hexdigest()[:16]

    @property
    def runs_whole(self) -> bool:
        """Whether each prompt runs in one pass, of which nothing is kept: it is an encoder."""
        return self.pooling is Pooling.OWN

    @property
    def prompt_token_limit(self) -> int:
        """How long a prompt may be; a model that generates needs space for one token more."""
        return self.context_token_limit - (self.kind is ModelKind.CHAT)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights, those of the adapters included."""
        return self.weight_bytes + sum(adapter.weight_bytes for adapter in self.adapters)


@dataclasses.dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that callers may name, loaded or not."""

    name: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    detail: str = ""
    """Why it is FAILED."""
    info: ModelInfo | None = None
    """None until it was loaded once."""
    adapters: tuple[str, ...] = ()
    """Names of those that requests may choose."""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingPrompt:
    """A text that a model was trained to see before some inputs, by its name in the model's folder."""

    name: str
    text: str
    is_default: bool = False
    """Whether it stands before inputs that name none."""


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
    """What it takes in addition to the model's weights, which it shares."""
