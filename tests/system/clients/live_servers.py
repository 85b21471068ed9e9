"""Real servers with a tiny model on loopback, for the clients of other languages to be tested against.

`python -m tests.system.clients.live_servers` prints one line of JSON (see `Servers`) once they serve, and
ends them when its standard input ends, so that they never outlive whoever started them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import REMEMBERING, TOOL_CALL
from tests.fixtures.rpc.authority import Authority
from tests.system.clients.fronts import busy_front, draining_front
from tests.system.clients.late_servers import coming_front, loading_server
from tests.system.clients.web_edge import web_edge
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import free_ports

TENANT = "clients"
TOKENS_PER_MINUTE = 60
BLOCK_TOKENS = 16
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", " a + b", "<|endoftext|>")
"""Tokens of a gap's two sides, and what fills it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Servers:
    """What a client needs to know of them: three with one model, two with their own, addresses beside."""

    model: str
    address: str
    """A plain server on TCP."""
    limited_address: str
    """A plain server on a Unix socket, where a tenant may use `tokens_per_minute`."""
    tokens_per_minute: int
    secured_address: str
    """A server with TLS, where every call needs the token."""
    ca_path: str
    token: str
    tenant: str
    """Whose token it is."""
    chat_address: str
    """A plain server with a model that reasons, writes a text and asks for the tool "get_weather"; it fills
    gaps, too."""
    vision_address: str
    """A plain server with a model that sees; empty without the extra that reads images."""
    draining_address: str
    """Refuses the first attempt of every call as a server that is stopping does; the next reach `address`."""
    busy_address: str
    """Refuses every call twice and says when to come back; the third one reaches `address`."""
    unused_address: str
    """Nobody listens here."""
    coming_address: str
    """Closes two connections at once, as if nobody were there yet; the third one reaches `address`."""
    loading_address: str
    """Says that its model loads, for ever."""
    web_url: str
    """An Envoy that speaks gRPC-Web to browsers and gRPC to `address`; empty where there is no Envoy."""

    def as_json(self) -> str:
        """Return one line."""
        return json.dumps(dataclasses.asdict(self))


@contextlib.contextmanager
def live_servers() -> Iterator[Servers]:
    """Serve until the block ends."""
    with contextlib.ExitStack() as stack:
        # A Unix socket's path may have a hundred characters only.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-")))
        authority = Authority()
        (folder / "ca.pem").write_bytes(authority.pem)
        certificate, key = authority.write_server(folder)
        token = new_token()
        tokens = folder / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text(line_of(token, tenant=TENANT, role=CallerRole.TENANT, expire_date=None) + "\n")
        model = tiny_model_dir(folder, "llama")
        script = (*TOOL_CALL, *INFILL)
        chat_model = chain_model_dir(folder / "chat", REMEMBERING, script, first="Ċ")
        vision_model = vision_model_dir(folder)
        plain_port, secured_port, unused_port = free_ports(3)
        small_blocks = ("--block-token-count", str(BLOCK_TOKENS))

        def start(name: str, *options: str, port: int | None = None, model: Path = model) -> ServerProcess:
            directory, log = folder / f"{name}-blocks", folder / f"{name}.log"
            server = ServerProcess(model=model, directory=directory, log=log, options=options, port=port)
            return stack.enter_context(server)

        plain = start("plain", *small_blocks, port=plain_port)
        chat = start("talk", *small_blocks, model=chat_model)
        vision = start("vision", *small_blocks, model=vision_model) if vision_model else None
        limited = start("limited", "--tenant-tokens-per-minute", str(TOKENS_PER_MINUTE))
        security = ("--tls-certificate", str(certificate), "--tls-key", str(key))
        secured = start("secured", *security, "--token-file", str(tokens), port=secured_port)
        plain.wait_until_serving()
        chat.wait_until_serving()
        limited.wait_until_serving()
        if vision is not None:
            vision.wait_until_serving()
        secured.wait_until_serving(grpc.ssl_channel_credentials(authority.pem))
        yield Servers(
            model=model.name,
            address=plain.address,
            limited_address=limited.address,
            tokens_per_minute=TOKENS_PER_MINUTE,
            secured_address=f"localhost:{secured_port}",
            ca_path=str(folder / "ca.pem"),
            token=token,
            tenant=TENANT,
            chat_address=chat.address,
            vision_address="" if vision is None else vision.address,
            draining_address=stack.enter_context(draining_front(plain.address)),
            busy_address=stack.enter_context(busy_front(plain.address)),
            unused_address=f"127.0.0.1:{unused_port}",
            coming_address=stack.enter_context(coming_front(plain.address)),
            loading_address=stack.enter_context(loading_server()),
            web_url=stack.enter_context(web_edge(plain.address)),
        )


def vision_model_dir(folder: Path) -> Path | None:
    """Write a tiny model that sees below `folder`; None without the extra that reads images."""
    if importlib.util.find_spec("mlx_vlm") is None:
        return None
    # It imports mlx-vlm itself.
    from tests.fixtures.models.vision import tiny_vision_dir

    return tiny_vision_dir(folder)


def main() -> None:
    """Serve until standard input ends."""
    with live_servers() as servers:
        print(servers.as_json(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
