"""Settings: declared once, read from flags, environment and file, validated once, frozen."""

from service.config.load import LoadedConfig, load_config
from service.config.sections import (
    SETTINGS,
    CacheConfig,
    Config,
    EngineConfig,
    LogConfig,
    ModelConfig,
    ServerConfig,
)

__all__ = [
    "SETTINGS",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "LoadedConfig",
    "LogConfig",
    "ModelConfig",
    "ServerConfig",
    "load_config",
]
