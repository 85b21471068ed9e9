"""Requests of the fuzzer: request `index` of `seed` always has the same bytes, metadata and deadline."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any, Self

from google.protobuf.descriptor import MethodDescriptor
from icehouse_server.rpc.rpc_server import SERVICE_NAMES, pool_with_v1

from tests.fixtures.models.vocabulary import VOCABULARY_SIZE
from tests.fixtures.rpc.worker import METHODS_HERE
from tests.system.fuzz import mutations
from tests.system.fuzz.frames import FAULTS, LONG_S
from tests.system.fuzz.values import TENANTS

_POOL: Any = pool_with_v1()
METHODS: dict[str, MethodDescriptor] = {
    f"/{name}": _POOL.FindServiceByName(service).methods_by_name[method]
    for name in METHODS_HERE
    for service, _, method in [name.partition("/")]
}
"""Every RPC that the server offers: `tests/unit/rpc/calls/test_methods.py` proves that the table has them."""

assert {path[1:].partition("/")[0] for path in METHODS} >= set(SERVICE_NAMES)

OURS = ("/icehouse.", "/vllm.")
"""Services whose every status has a reason; of the others gRPC's own servicers answer some."""

INVENTED = ("/icehouse.v1.InferenceService/Drop", "/icehouse.v1.Nobody/Generate", "/nothing", "/a/b/c")
"""Methods that no server has."""

_PATHS = tuple(sorted(METHODS))
_WEIGHTS = tuple(4 if path.startswith(OURS) else 1 for path in _PATHS)
"""Ours have more to break than gRPC's own."""

_CHAT_PATHS = tuple(path for path in _PATHS if "prompt" in METHODS[path].input_type.fields_by_name)
_IMAGE_SHARE = 0.1
"""Of the conversations; a model that reads text alone refuses them."""

_WHOLE_SHARE = 0.4
"""Of the conversations for a model that sees: one broken image is enough for the others not to be run."""

_WORKER_PATH = "/vllm.grpc.engine.VllmEngine/Generate"

_STREAM_S = 2.0
"""Ends a stream that would go on for ever, if the caller does not."""

_ODD_HEADERS = (
    "x-tenant",
    "x-session-id",
    "x-priority",
    "icehouse-tenant",
    "tracestate",
    "baggage",
    "grpc-previous-rpc-attempts",
    "x-icehouse-prefix",
    "cookie",
)


@dataclasses.dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One call: what is sent, and how its caller behaves."""

    path: str
    messages: tuple[bytes, ...]
    """One, unless the method takes a stream."""
    credentials: str
    """Whose token comes with it: a tenant's name, "operator", "none" or "wrong"."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_s: float = LONG_S
    leave_after: int | None = None
    """Answers after which the caller leaves; 0 leaves at once, None stays to the end."""
    is_compressed: bool = False
    frame: str | None = None
    """Which of `frames.FAULTS` the message's frame has; None: a real client sends it."""

    def to_json(self) -> str:
        """Return it as text, its bytes in base64, to keep it as a regression test."""
        held = dataclasses.asdict(self)
        held["messages"] = [_text_of(data) for data in self.messages]
        held["metadata"] = [
            [key, {"base64": _text_of(value)} if isinstance(value, bytes) else value]
            for key, value in self.metadata
        ]
        return json.dumps(held, indent=1)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `to_json` wrote."""
        held = json.loads(file.read_text(encoding="utf-8"))
        held["messages"] = tuple(base64.b64decode(text) for text in held["messages"])
        held["metadata"] = tuple(
            (key, base64.b64decode(value["base64"]) if isinstance(value, dict) else value)
            for key, value in held["metadata"]
        )
        return cls(**held)


def request_of(seed: int, index: int) -> FuzzRequest:
    """Return request `index` of `seed`."""
    rng = random.Random(f"{seed}/{index}")
    if rng.random() < 0.005:
        return FuzzRequest(rng.choice(INVENTED), (rng.randbytes(8),), "operator")
    path = rng.choices(_PATHS, _WEIGHTS)[0]
    method = METHODS[path]
    count = rng.choice((0, 1, 1, 2, 3)) if method.client_streaming else 1
    whole = FuzzRequest(path, tuple(_message(method, rng) for _ in range(count)), _credentials(rng))
    if not method.client_streaming and not method.server_streaming and rng.random() < 0.01:
        return dataclasses.replace(whole, frame=rng.choice(tuple(FAULTS)))
    return dataclasses.replace(
        whole,
        metadata=_metadata(rng),
        timeout_s=_timeout_s(method, rng),
        leave_after=_leave_after(method, rng),
        is_compressed=rng.random() < 0.02,
    )


def image_request_of(seed: int, index: int) -> FuzzRequest:
    """Return request `index` of `seed` to a model that sees: a conversation with images in it."""
    rng = random.Random(f"images/{seed}/{index}")
    path = rng.choice(_CHAT_PATHS)
    method = METHODS[path]
    message = mutations.good(method.input_type, rng)
    mutations.add_images(message, rng, are_whole=rng.random() < _WHOLE_SHARE)
    kind = rng.random()
    if kind < 0.1:
        mutations.spoil(message, rng)
    data = message.SerializeToString()
    return FuzzRequest(
        path,
        (mutations.damaged(data, rng) if kind > 0.95 else data,),
        _credentials(rng),
        timeout_s=_timeout_s(method, rng),
        leave_after=_leave_after(method, rng),
    )


def tensor_request_of(seed: int, index: int) -> FuzzRequest:
    """Return request `index` of `seed` to a model that sees, of a gateway that has prepared the images."""
    rng = random.Random(f"tensors/{seed}/{index}")
    message: Any = mutations.good(METHODS[_WORKER_PATH].input_type, rng)
    mutations.add_tensors(message, rng, token_id=VOCABULARY_SIZE, side=16, tile_tokens=4)
    for name in ("extra_mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if rng.random() < 0.95:
            message.ClearField(name)
    message.ClearField("data_parallel_rank")
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        mutations.spoil(rng.choice((message, message.mm_inputs, message.mm_inputs.pixel_values)), rng)
    timeout_s = _timeout_s(METHODS[_WORKER_PATH], rng)
    return FuzzRequest(_WORKER_PATH, (message.SerializeToString(),), _credentials(rng), timeout_s=timeout_s)


def _message(method: MethodDescriptor, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.03:
        return rng.randbytes(rng.randrange(80))
    message = mutations.good(method.input_type, rng)
    if "prompt" in method.input_type.fields_by_name and rng.random() < _IMAGE_SHARE:
        mutations.add_images(message, rng)
    if kind < 0.2:
        return message.SerializeToString()
    if kind < 0.7:
        for _ in range(rng.choice((1, 1, 2, 3))):
            mutations.spoil(message, rng)
        return message.SerializeToString()
    data = message.SerializeToString()
    if kind < 0.74:
        return data + mutations.nested(method.input_type, rng)
    if kind < 0.77:
        return data + mutations.clash(method.input_type, rng)
    if kind < 0.8:
        return data + mutations.unknown(rng)
    return mutations.damaged(data, rng)


def _credentials(rng: random.Random) -> str:
    return rng.choices(("operator", *TENANTS, "none", "wrong"), (60, 20, 12, 4, 4))[0]


def _metadata(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    kind = rng.random()
    if kind < 0.75:
        return ()
    if kind < 0.85:
        made = f"00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-{rng.randrange(4):02x}"
        return (
            ("traceparent", made[: rng.choice((55, 55, 3, 20, 54))]),
            ("tracestate", "a=b," * rng.choice((1, 99))),
        )
    if kind < 0.97:
        word = "".join(chr(rng.randrange(33, 127)) for _ in range(rng.choice((1, 8, 200))))
        return tuple((rng.choice(_ODD_HEADERS), word) for _ in range(rng.choice((1, 2, 20))))
    if kind < 0.99:
        return (("x-odd-bin", rng.randbytes(rng.choice((0, 1, 300)))),)
    # More than the server takes.
    return (("x-long", "a" * rng.choice((8000, 16_300, 20_000))),)


def _timeout_s(method: MethodDescriptor, rng: random.Random) -> float:
    if rng.random() < 0.06:
        return rng.choice((0.0, 0.0005, 0.002, 0.01, 0.05))
    if method.server_streaming:
        return _STREAM_S
    return 1e9 if rng.random() < 0.02 else LONG_S


def _leave_after(method: MethodDescriptor, rng: random.Random) -> int | None:
    # It has no end of its own; any other that has none would end with its deadline.
    if method.name.startswith(("Watch", "Subscribe")):
        return rng.choice((0, 1, 1, 1))
    return rng.choice((0, 1, 2)) if rng.random() < 0.04 else None


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
