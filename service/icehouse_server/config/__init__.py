"""Settings: declared once, read from flags, environment and file, validated once, then frozen."""

from icehouse_server.config.edge import ConnectionConfig, SecurityConfig, ServerConfig, TenantConfig
from icehouse_server.config.http import HttpConfig
from icehouse_server.config.load import LoadedConfig, load_config
from icehouse_server.config.sections import (
    SETTINGS,
    CacheConfig,
    Config,
    EngineConfig,
    FleetConfig,
    GroupConfig,
    KvEventsConfig,
    LogConfig,
    ModelConfig,
    TelemetryConfig,
)

__all__ = [
    "SETTINGS",
    "CacheConfig",
    "Config",
    "ConnectionConfig",
    "EngineConfig",
    "FleetConfig",
    "GroupConfig",
    "HttpConfig",
    "KvEventsConfig",
    "LoadedConfig",
    "LogConfig",
    "ModelConfig",
    "SecurityConfig",
    "ServerConfig",
    "TelemetryConfig",
    "TenantConfig",
    "load_config",
]
