"""Preflight: what makes a start fail at once. Finding and loading a model may take minutes, and nobody wants
to learn of a wrong setting only then."""

from __future__ import annotations

from icehouse_server.bootstrap.cache_parts import check_directory
from icehouse_server.bootstrap.model_source import check_adapters
from icehouse_server.bootstrap.telemetry import worker_models
from icehouse_server.config import Config
from icehouse_server.rpc.access.credentials import check_secrets
from icehouse_server.rpc.image_sources.image_address import SourceRules
from icehouse_server.rpc.listen_address import check_address, check_free, check_metrics_free, check_port_free


def check_settings(config: Config) -> None:
    """Raise IcehouseError for an address that is taken or open to others, and for unusable files and folders.
    Wiring a server's parts refuses other settings, also before a model is located."""
    check_address(config.server, config.security)
    check_free(config.server)
    for port in config.worker_ports:
        check_port_free(config.server.host, port, flags="worker_")
    check_metrics_free(config.telemetry)
    check_secrets(config.security)
    SourceRules.of(config.server)
    worker_models(config, ports={})
    check_adapters(config.model)
    check_directory(config.cache)
