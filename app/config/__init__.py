"""Settings: command line > ANYCHIP_* environment > anychip.toml > default.

Owns: every setting with its default, limits and help text, in sections; the only place that reads the environment. The
command line is generated from these tables and `docs/settings.md` is compared with them by a test.
Must not know what a setting changes.
"""

from __future__ import annotations

from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from app.config.devices import BatchSettings, DeviceSettings, MemorySettings
from app.config.models import ModelSettings
from app.config.network import LifetimeSettings, LimitSettings, NetworkSettings, SecuritySettings
from app.config.observability import ObservabilitySettings
from app.config.values import STAGES, sizes_of, split

__all__ = ["CONFIG_FILE", "SECTIONS", "STAGES", "Settings", "sizes_of", "split"]

CONFIG_FILE = "anychip.toml"
SECTIONS = (
    ModelSettings,
    DeviceSettings,
    BatchSettings,
    MemorySettings,
    NetworkSettings,
    SecuritySettings,
    LimitSettings,
    LifetimeSettings,
    ObservabilitySettings,
)


# The last base's fields come first.
class Settings(
    ObservabilitySettings,
    LifetimeSettings,
    LimitSettings,
    SecuritySettings,
    NetworkSettings,
    MemorySettings,
    BatchSettings,
    DeviceSettings,
    ModelSettings,
    BaseSettings,
):
    """What the service can be told. Frozen: read once, at the start."""

    model_config = SettingsConfigDict(
        env_prefix="ANYCHIP_", frozen=True, extra="forbid", protected_namespaces=(), toml_file=CONFIG_FILE
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, environment, file: the first that says something wins."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)
