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
    """The state of a model in the pool; FAILED can follow any other state."""

    ABSENT = enum.auto()
    """A request that names it loads it."""
    FETCHING = enum.auto()
    """Its files are being located or downloaded."""
    LOADING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    """Its running calls end, then it is unloaded."""
    FAILED = enum.auto()
    """It could not be loaded, or its engine failed; a later request that names it tries again."""


class ModelKind(enum.Enum):
    """What a model is for."""

    CHAT = enum.auto()
    """It continues texts; its hidden states and first tokens serve embeddings and reranking too."""
    EMBEDDING = enum.auto()
    RERANK = enum.auto()
    """It has a head that scores pairs of texts."""


class PassSplit(enum.Enum):
    """Where a forward pass is split by sequence."""

    ATTENTION = "attention"
    MODULE = "module"
    """In a layer, the module that keeps state."""
    ALONE = "alone"
    """Sequences share no pass."""


class Sight(enum.Enum):
    """Whether images are served for a model folder, with or without the extra `vision`."""

    NONE = enum.auto()
    """It has no vision tower that this server knows."""
    SERVED = enum.auto()
    TEXT_ONLY = enum.auto()
    """The extra is missing: images are refused."""
    UNREADABLE = enum.auto()
    """The extra is missing, and without it the model cannot be loaded at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormatInfo:
    """How a model's chat replies are read, as `ModelService` shows it. Unknown strings are empty."""

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
    """The name that callers use in `model`; the empty name means this model too."""
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
    """KV growth per token over all layers with unlimited context; 0 if unknown."""
    cache_classes: tuple[str, ...]
    """Distinct cache class names of the model's layers, in order of first appearance."""
    fingerprint_hex: str
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    device: str
    sees_images: bool = False
    """Whether prompts may contain images."""
    image_refusal: str = "reads only text"
    """How the error describes the model if they may not."""
    runs_images_whole: bool = False
    """Whether each token of an image attends to the whole image, so that no pass may end inside one."""
    pass_splits: tuple[PassSplit, ...] = ()
    """Sorted by name."""
    embedding_size: int = 0
    """Size of the hidden states that embeddings are made of; 0 for models without embeddings."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Adapters that requests may name, in the config's order."""
    reply_format: ReplyFormatInfo | None = None
    """None without a chat template."""
    kind: ModelKind = ModelKind.CHAT
    pooling: Pooling = Pooling.LAST_TOKEN
    """How hidden states become a vector if a request does not say."""
    embedding_prompts: tuple[EmbeddingPrompt, ...] = ()
    """Texts that the model was trained to see before an input; requests may name one."""
    system_digest_hex: str = ""
    """Digest of everything that outputs depend on, except the request and its adapter."""

    def system_fingerprint(self, adapter: AdapterName) -> str:
        """Return a digest of everything that outputs depend on, except the request, as 16 hex digits."""
        digests = (each.digest for each in self.adapters if each.name == adapter)
        parts = bytes.fromhex(self.system_digest_hex) + b"".join(digests)
        return hashlib.sha256(parts).hexdigest()[:16]

    @property
    def runs_whole(self) -> bool:
        """Whether each prompt runs in one pass and nothing of it is kept, as in an encoder."""
        return self.pooling is Pooling.OWN

    @property
    def prompt_token_limit(self) -> int:
        """How many tokens a prompt may have; a model that generates needs space for one more."""
        return self.context_token_limit - (self.kind is ModelKind.CHAT)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights, including the adapters'."""
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
    """None until it has been loaded once."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that requests may choose."""


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingPrompt:
    """A text that a model was trained to see before some inputs, with its name from the model's folder."""

    name: str
    text: str
    is_default: bool = False
    """Whether it is put before inputs of requests that name none."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One loaded adapter, as `ModelService` shows it."""

    name: AdapterName
    """The name that callers use in `adapter`."""
    kind: str
    """`fine_tune_type` of its adapter_config.json: "lora", "dora" or "full"."""
    digest: AdapterDigest
    parameter_count: int
    weight_bytes: int
    """What it takes in addition to the model's weights, which all adapters share."""
