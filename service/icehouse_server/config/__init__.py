"""Settings: declared once, read from flags, environment and file, validated once, frozen."""

from icehouse_server.config.cache import CacheConfig
from icehouse_server.config.connection import ConnectionConfig
from icehouse_server.config.fleet import FleetConfig, KvEventsConfig
from icehouse_server.config.load import LoadedConfig, load_config
from icehouse_server.config.model import ModelConfig
from icehouse_server.config.sections import SETTINGS, Config, EngineConfig, LogConfig, ServerConfig
from icehouse_server.config.security import SecurityConfig
from icehouse_server.config.telemetry import TelemetryConfig
from icehouse_server.config.tenants import TenantConfig

__all__ = [
    "SETTINGS",
    "CacheConfig",
    "Config",
    "ConnectionConfig",
    "EngineConfig",
    "FleetConfig",
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
