"""The published service config says what is safe: every client library in clients/ takes it from here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from icehouse.v1 import embedding_service_pb2, rerank_service_pb2
from icehouse.v1 import inference_service_pb2 as inference

CONFIG: dict[str, Any] = json.loads((Path(__file__).parents[3] / "clients/service_config.json").read_text())

_SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"]
_EMBEDDING = embedding_service_pb2.DESCRIPTOR.services_by_name["EmbeddingService"]
_RERANK = rerank_service_pb2.DESCRIPTOR.services_by_name["RerankService"]


def test_what_answers_once_is_retried_and_only_where_no_server_took_it() -> None:
    (method,) = CONFIG["methodConfig"]
    services = {found.full_name: found for found in (_SERVICE, _EMBEDDING, _RERANK)}
    names = [(name["service"], name["method"]) for name in method["name"]]
    assert names == list(zip(services, ("Generate", "Embed", "Rerank"), strict=True))
    assert not any(services[service].methods_by_name[name].server_streaming for service, name in names)
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert 2 <= method["retryPolicy"]["maxAttempts"] <= 5
    assert "hedgingPolicy" not in json.dumps(CONFIG)


def test_a_server_that_does_not_serve_is_passed_over() -> None:
    assert CONFIG["healthCheckConfig"] == {"serviceName": _SERVICE.full_name}
    # gRPC looks at health only where a policy chooses among connections; pick_first does not.
    assert CONFIG["loadBalancingConfig"] == [{"round_robin": {}}]


def test_what_clients_carry_is_a_copy() -> None:
    clients = Path(__file__).parents[3] / "clients"
    copies = sorted(clients.glob("*/service_config.json"))
    assert copies != []
    published = (clients / "service_config.json").read_bytes()
    assert [str(copy) for copy in copies if copy.read_bytes() != published] == []
