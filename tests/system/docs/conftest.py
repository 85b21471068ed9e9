"""Servers that the pages' calls are answered by, and the folders that their readers sit in."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.fixtures.models.chat_templates import REMEMBERING, TOOL_CALL
from tests.fixtures.models.vision import tiny_vision_dir
from tests.fixtures.pages.desk import Desk
from tests.fixtures.rpc.authority import Authority
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import free_ports

HAS_VISION = importlib.util.find_spec("mlx_vlm") is not None

SCRIPT = TOOL_CALL[3:]
"""Without its thoughts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A server as pages call it, and the files that callers of it have."""

    address: str
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    blocks: Path | None = None
    """Its cache directory."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Tiny models: one that reads text, and where that can be one that sees."""
    folder = tmp_path_factory.mktemp("models")
    seeing = {"seeing": tiny_vision_dir(folder)} if HAS_VISION else {}
    return {"plain": tiny_model_dir(folder, "llama"), **seeing}


@pytest.fixture(scope="session")
def places(
    tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]
) -> Iterator[Mapping[str, Place]]:
    folder = tmp_path_factory.mktemp("pages")
    model = models["plain"]
    adapters = ",".join(
        f"{name}={tiny_adapter_dir(folder, model, seed=seed, name=name)}"
        for seed, name in enumerate(("poetry", "legal"), 1)
    )
    calling = chain_model_dir(folder / "calling", REMEMBERING, SCRIPT, first="Ċ")
    authority, token = Authority(), new_token()
    certificate, key = authority.write_server(folder)
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(line_of(token, tenant="search", role=CallerRole.TENANT, expire_date=None) + "\n")
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--token-file", str(tokens))

    with contextlib.ExitStack() as stack:

        def start(name: str, served: Path, *options: str, is_secured: bool = False) -> str:
            (port,) = free_ports(1)
            blocks, log = folder / f"{name}-blocks", folder / f"{name}.log"
            small = ("--block-token-count", "16", "--min-prefix-token-count", "0", *options)
            server = ServerProcess(model=served, directory=blocks, log=log, options=small, port=port)
            stack.enter_context(server)
            server.wait_until_serving(grpc.ssl_channel_credentials(authority.pem) if is_secured else None)
            return f"localhost:{port}"

        callers = {"server.pem": authority.pem, "token": f"{token}\n".encode()}
        yield {
            "plain": Place(start("plain", model, "--adapters", adapters), blocks=folder / "plain-blocks"),
            "calling": Place(start("calling", calling)),
            "secured": Place(start("secured", model, *tls, is_secured=True), callers),
            **({"seeing": Place(start("seeing", models["seeing"]))} if HAS_VISION else {}),
        }


@pytest.fixture(scope="session")
def left(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Path:
    """What a server that was stopped in order has left in its cache directory."""
    folder = tmp_path_factory.mktemp("left")
    server = ServerProcess(model=models["plain"], directory=folder / "blocks", log=folder / "log")
    with server:
        server.wait_until_serving()
        with grpc.insecure_channel(server.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            stub.Generate(
                messages.GenerateRequest(prompt={"text": "Once upon a time " * 100}, max_output_tokens=4)
            )
        server.terminate()
        assert server.wait() == 0
    return folder / "blocks"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A folder to run in."""
    return Desk(tmp_path / "desk")
