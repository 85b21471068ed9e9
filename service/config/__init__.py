"""Settings: declared once, read from flags, environment and file, validated once, frozen."""

from service.config.cache import CacheConfig
from service.config.connection import ConnectionConfig
from service.config.load import LoadedConfig, load_config
from service.config.model import ModelConfig
from service.config.sections import (
    SETTINGS,
    Config,
    EngineConfig,
    LogConfig,
    ServerConfig,
)
from service.config.security import SecurityConfig
from service.config.telemetry import TelemetryConfig
from service.config.tenants import TenantConfig

__all__ = [
    "SETTINGS",
    "CacheConfig",
    "Config",
    "ConnectionConfig",
    "EngineConfig",
    "LoadedConfig",
    "LogConfig",
    "ModelConfig",
    "SecurityConfig",
    "ServerConfig",
    "TelemetryConfig",
    "TenantConfig",
    "load_config",
]
