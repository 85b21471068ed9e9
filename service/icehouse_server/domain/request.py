"""Generation request: what one caller asks of the engine, after validation and tokenization.

Also its parts: pooling, log probabilities, speculation, and images as a model takes them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from icehouse_server.domain.blocks import HostTensor, TokenKeys, image_keys
from icehouse_server.domain.chat import Reasoning
from icehouse_server.domain.ids import (
    DEFAULT_TENANT,
    NO_ADAPTER,
    AdapterName,
    CacheScope,
    ImageDigest,
    RequestId,
    Tenant,
)
from icehouse_server.domain.response_format import Grammar
from icehouse_server.domain.sampling import SEED_RANGE, SamplingParams

_IMAGE_TAG = b"icehouse.image.v1\x00"

_PART_MARK = "#"
"""Separates a call's name from the number of one of its requests. No caller's name contains it."""
_TENANT_MARK = "@"
"""Separates the name from its tenant. No caller's name contains it either; a tenant's may."""


class CacheUse(enum.Enum):
    """What a request may do with the prefix cache."""

    READ_WRITE = enum.auto()
    READ_ONLY = enum.auto()
    WRITE_ONLY = enum.auto()
    OFF = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Token ids are in the vocabulary, and limits were already checked."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int
    """>= 1, or 0 for a warm-up, which only computes and keeps the prompt."""
    sampling: SamplingParams
    stop: tuple[str, ...]
    arrival_time: float
    """`Clock.monotonic` when the call reached the edge; TTFT counts from here."""
    deadline_time: float | None = None
    """`Clock.monotonic` after which the client no longer waits."""
    cache_use: CacheUse = CacheUse.READ_WRITE
    tenant: Tenant = DEFAULT_TENANT
    adapter: AdapterName = NO_ADAPTER
    """Already checked: an adapter that is served."""
    shared_tenant: Tenant | None = None
    """Another tenant whose blocks it may start from but not write."""
    priority: int = 0
    """Higher runs first."""
    shows_markers: bool = False
    """Whether the text includes special tokens, except those that begin, end or pad it."""
    grammar: Grammar | None = None
    """What the output must be, if anything."""
    reasoning: Reasoning | None = None
    """How reasoning tokens are recognized; None if they are not."""
    logprobs: LogprobsWanted | None = None
    """None for no log probabilities."""
    speculation: Speculation | None = None
    session_id: str = ""
    """The conversation that it is a turn of, as its caller or a gateway names it, then after a slash the
    agent that calls within it; empty if unknown."""
    parent_session_id: str = ""
    """The session of the agent that started this one; empty if there is none."""
    opening: int = 0
    """A hash of how its conversation begins: a session may have several conversations, such as subagents'."""
    ends_session: bool = False
    """Whether it is the last turn; the session ends with it, unless it fails."""
    images: tuple[ImageSpan, ...] = ()
    """Images that replace some of the prompt's tokens; ascending, without overlap."""
    border_token_indices: tuple[int, ...] = ()
    """Inside the prompt, ascending: where other prompts may diverge, so that keeping a state pays off."""
    is_prefetch: bool = False
    """Whether nobody asked for it: it is a warm-up for a session's next turn, and counted separately."""
    pooling: Pooling | None = None
    """Asks for the prompt's pooled hidden states. All its tokens are computed and nothing is generated."""

    @property
    def name(self) -> str:
        """The caller's name for it, unique among the tenant's running requests."""
        return name_of(self.request_id)

    @property
    def scope(self) -> CacheScope:
        """The requests that share its KV."""
        return CacheScope(self.tenant, self.adapter)

    @property
    def shared_scope(self) -> CacheScope | None:
        """A second scope whose KV it may start from."""
        return None if self.shared_tenant is None else CacheScope(self.shared_tenant, self.adapter)

    def keys(self, token_ids: tuple[int, ...]) -> TokenKeys:
        """Return the token keys of these tokens, which begin with the prompt's tokens."""
        return keys_of(token_ids, self.images)

    def image_parts(self, start: int, stop: int) -> tuple[ImagePart, ...]:
        """Return the parts of images within [start, stop) of prompt and output."""
        parts = []
        for span in self.images:
            first, last = max(start, span.start_token_index), min(stop, span.end_token_index)
            if first < last:
                ids = self.prompt_token_ids[span.start_token_index : span.end_token_index]
                place = first - span.start_token_index
                parts.append(ImagePart(first - start, place, last - first, span.image, ids))
        return tuple(parts)

    def whole_image(self, span: ImageSpan) -> ImagePart:
        return self.image_parts(span.start_token_index, span.end_token_index)[0]

    def rope_positions(self) -> RopePositions | None:
        """Return the positions of its tokens; None if they are simply their indices in the sequence."""
        return RopePositions.of(len(self.prompt_token_ids), self.images)

    def completion(self, index: int) -> GenerationRequest:
        """Return the request for another output of the same prompt; 0 is this one.

        Its seed is higher by `index`, and only the first one returns the prompt's log probabilities.
        """
        if index == 0:
            return self
        seed = (self.sampling.seed + index) % SEED_RANGE
        logprobs = self.logprobs
        return dataclasses.replace(
            self,
            request_id=part_of(self.request_id, index),
            sampling=dataclasses.replace(self.sampling, seed=seed),
            logprobs=None if logprobs is None else dataclasses.replace(logprobs, of_prompt=False),
        )


def request_id_of(name: str, tenant: Tenant) -> RequestId:
    """Return the id of a tenant's request; other tenants may use the same name at the same time."""
    return RequestId(f"{name}{_TENANT_MARK}{tenant}" if tenant else name)


def name_of(request_id: RequestId) -> str:
    """Return the caller's name, with the number of the request if its call has several."""
    return request_id.partition(_TENANT_MARK)[0]


def call_of(request_id: RequestId) -> RequestId:
    """Return the id of the call that a request belongs to, which is the id of the call's first request."""
    name, mark, tenant = request_id.partition(_TENANT_MARK)
    return RequestId(name.partition(_PART_MARK)[0] + mark + tenant)


def part_of(call: RequestId, index: int) -> RequestId:
    """Return the id of a call's request number `index`; the first one has the call's own id."""
    name, mark, tenant = call.partition(_TENANT_MARK)
    return RequestId(f"{name}{_PART_MARK}{index}{mark}{tenant}") if index else call


Vector = npt.NDArray[np.float32]


class Pooling(enum.Enum):
    """How the hidden states of an input's tokens become one vector."""

    LAST_TOKEN = enum.auto()
    MEAN = enum.auto()
    OWN = enum.auto()
    """Whatever an encoder makes of a whole prompt, which runs in one pass: its vector, or just its score."""


def finished(vector: Vector, *, dimension_count: int, is_normalized: bool) -> Vector:
    """Return the leading dimensions, scaled to length 1 if `is_normalized`. A zero vector stays zero."""
    leading = vector[:dimension_count]
    length = float(np.linalg.norm(leading))
    return leading / np.float32(length) if is_normalized and length > 0 else leading


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """Which log probabilities a request wants, for output tokens and, with `of_prompt`, prompt tokens."""

    top_count: int = 0
    """How many of the likeliest tokens to report for each position."""
    of_prompt: bool = False
    token_ids: tuple[int, ...] = ()
    """Tokens to report for each position, likely or not. All are in the vocabulary."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token in the model's own distribution.

    So temperature, filters, penalties, bias and constraints do not affect it.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary; ties share the better rank."""
    top: tuple[Logprob, ...] = ()
    """The likeliest tokens, in descending order."""
    asked: tuple[Logprob, ...] = ()
    """The tokens that the request asked for, in its order."""
    text_offset: int | None = None
    """Where its text begins in the output, in bytes of UTF-8. None for prompt tokens."""


class Drafting(enum.Enum):
    """How draft tokens are proposed."""

    PROMPT_LOOKUP = enum.auto()
    """The tokens that followed an earlier occurrence of the last tokens (Saxena 2023)."""
    DRAFT_MODEL = enum.auto()
    """The likeliest tokens of the server's draft model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """How a request wants to speculate."""

    draft_token_limit: int
    """Most draft tokens in a step, >= 1."""
    ngram_token_limit: int = 1
    """Prompt lookup: how many of the last tokens to match, >= 1; fewer if these have no match."""
    drafting: Drafting = Drafting.PROMPT_LOOKUP


class SpeculationLimit(enum.Enum):
    """Why a request that asked for speculation was decoded without it, from the start or at the end."""

    NONE = enum.auto()
    CACHE = enum.auto()
    """Rejected tokens cannot be removed from the model's caches."""
    SAMPLING = enum.auto()
    """Each token's draw depends on the token before it: penalties, bad words, a response format
    or a budget of reasoning tokens."""
    NO_DRAFT_MODEL = enum.auto()
    """The server has no draft model."""
    ACCEPTANCE = enum.auto()
    """Too few recent guesses were right, so the rest was decoded without speculation."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one step or of a whole request, and how many were accepted."""

    proposed_count: int = 0
    accepted_count: int = 0
    limit: SpeculationLimit = SpeculationLimit.NONE

    def plus(self, step: DraftCounts) -> DraftCounts:
        """Return the sum with a later step's counts, with the limit of that step."""
        return DraftCounts(
            self.proposed_count + step.proposed_count, self.accepted_count + step.accepted_count, step.limit
        )


NO_DRAFTS = DraftCounts()
"""Counts of a request that did not ask for speculation, or has not begun."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInput:
    """One image, preprocessed."""

    digest: ImageDigest
    tensors: tuple[HostTensor, ...]
    """Inputs of the vision tower, by their names in the model's code."""
    feature_count: int
    """How many prompt tokens get their embeddings from the tower."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of these tokens, for models that use them as positions (`RopePositions`)."""
    is_seen_whole: bool = False
    """Whether each of its tokens attends to all of them, not only earlier ones; they run in one pass then."""

    @property
    def pixels(self) -> HostTensor:
        """The largest tensor, which has the pixels."""
        return max(self.tensors, key=lambda tensor: tensor.data.nbytes)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor as its sender made it. Only that its size matches its shape is checked."""

    tensor: HostTensor
    field: str
    """The sender's name for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SentImages:
    """Images that a gateway has prepared, for a prompt that already has their tokens."""

    tensors: tuple[SentTensor, ...]
    """The tensors of all images, the pixels first."""
    places: tuple[range, ...]
    """Positions of each image's tokens in the prompt, in order; text may be among them."""
    places_field: str
    token_id: int | None
    """The image token that the sender used; None if not given."""
    token_field: str


ImageKey = tuple[ImageDigest, tuple[int, ...]]
"""An image, and the token ids of its span, some of which may be text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a prompt, from the first token whose vector the tower makes to just after the last one."""

    start_token_index: int
    end_token_index: int
    image: ImageInput

    @property
    def token_count(self) -> int:
        return self.end_token_index - self.start_token_index


@dataclasses.dataclass(frozen=True, slots=True)
class ImagePart:
    """The tokens of a run that are in an image's span."""

    start: int
    """Where the first of them is in the run."""
    place: int
    """Where the first of them is in the span."""
    count: int
    image: ImageInput
    span_token_ids: tuple[int, ...]

    @property
    def key(self) -> ImageKey:
        """The key of the vectors of its span."""
        return self.image.digest, self.span_token_ids


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RopePositions:
    """Three positions for each token of a prompt: frame, row and column within an image, which begin after
    all positions before the image. The three are equal for text (MRoPE of Qwen2-VL, arXiv 2409.12191)."""

    of_prompt: npt.NDArray[np.int32]
    """[3, tokens]."""
    shift: int
    """After the prompt, a token's positions are its index in the sequence plus this."""

    @classmethod
    def of(cls, token_count: int, images: Sequence[ImageSpan]) -> RopePositions | None:
        """Return the positions of a prompt; None if no image has a grid."""
        if not any(span.image.grid for span in images):
            return None
        parts: list[npt.NDArray[np.int32]] = []
        place = position = 0
        for span in images:
            assert span.image.grid is not None, "a model lays all images out or none"
            parts.append(text_positions(position, span.start_token_index - place))
            position += span.start_token_index - place
            parts.append(np.indices(span.image.grid, dtype=np.int32).reshape(3, -1) + position)
            position += max(span.image.grid)
            place = span.end_token_index
        parts.append(text_positions(position, token_count - place))
        laid = np.concatenate(parts, axis=1, dtype=np.int32)
        assert laid.shape == (3, token_count), (laid.shape, token_count)
        return cls(laid, position - place)

    def at(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Return the positions of `count` tokens from `start` on, [3, count], within or after the prompt."""
        inside = self.of_prompt[:, start : start + count]
        first = max(start, self.of_prompt.shape[1])
        behind = text_positions(first + self.shift, count - inside.shape[1])
        return np.concatenate([inside, behind], axis=1)


def text_positions(first: int, count: int) -> npt.NDArray[np.int32]:
    """Return the positions of `count` text tokens, [3, count]."""
    return np.tile(np.arange(first, first + count, dtype=np.int32), (3, 1))


def keys_of(token_ids: tuple[int, ...], images: Sequence[ImageSpan]) -> TokenKeys:
    """Return the token keys of a run with images."""
    if not images:
        return token_ids
    keys = list(token_ids)
    for span in images:
        inside = slice(span.start_token_index, span.end_token_index)
        keys[inside] = image_keys(span.image.digest, token_ids[inside])
    return tuple(keys)


def image_digest(processor_fingerprint: bytes, tensors: Sequence[HostTensor]) -> ImageDigest:
    """Return an image's digest: over its processor, and the names, types, shapes and bytes of its tensors."""
    digest = hashlib.sha256(_IMAGE_TAG + hashlib.sha256(processor_fingerprint).digest())
    for tensor in tensors:
        facts = f"{tensor.name}\x00{tensor.dtype}\x00{tensor.shape}\x00".encode()
        digest.update(len(facts).to_bytes(8, "little") + facts)
        digest.update(tensor.data.nbytes.to_bytes(8, "little"))
        digest.update(tensor.data)
    return ImageDigest(digest.digest())
