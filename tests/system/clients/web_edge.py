"""Envoy with gRPC-Web in front of one server, for clients in browsers: deploy/envoy's, without TLS.

Pages of loopback may call it, from any port.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.fixtures.patience import BOUND_S
from tests.system.mesh.envoy import binary, config, free_ports


def _plain_config(*, edge_port: int, server_port: int, admin_path: Path) -> str:
    """Return what is committed, with one server and neither TLS nor the JSON that needs the protos' file."""
    found = config()
    found["admin"]["address"] = {"pipe": {"path": str(admin_path)}}
    (listener,) = found["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = edge_port
    (chain,) = listener["filter_chains"]
    del chain["transport_socket"]
    manager = chain["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    policy = host["typed_per_filter_config"]["envoy.filters.http.cors"]
    policy["allow_origin_string_match"] = [{"safe_regex": {"regex": r"http://127\.0\.0\.1:\d+"}}]
    manager["http_filters"] = [
        one for one in manager["http_filters"] if not one["name"].endswith("json_transcoder")
    ]
    (cluster,) = found["static_resources"]["clusters"]
    del cluster["transport_socket"]
    (locality,) = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = locality["lb_endpoints"][:1]
    address = locality["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    address["port_value"] = server_port
    return json.dumps(found)


@contextlib.contextmanager
def web_edge(address: str) -> Iterator[str]:
    """Serve what is at "127.0.0.1:port" by gRPC-Web at the URL that is returned; empty without an Envoy."""
    envoy = binary()
    if envoy is None:
        yield ""
        return
    (edge_port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="icehouse-") as scratch:
        folder = Path(scratch)
        server_port = int(address.rpartition(":")[2])
        text = _plain_config(edge_port=edge_port, server_port=server_port, admin_path=folder / "admin")
        (folder / "envoy.json").write_text(text)
        command = [
            str(envoy),
            "-c",
            str(folder / "envoy.json"),
            "--disable-hot-restart",
            "--concurrency",
            "1",
        ]
        with (folder / "envoy.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        try:
            yield f"http://127.0.0.1:{edge_port}"
        finally:
            process.terminate()
            process.wait(BOUND_S)
