"""Settings: command line > ANYCHIP_* environment > anychip.toml > default.

Owns: every setting with its default, limits and help text, in sections; the only place that reads the environment. The
command line is generated from these tables and `docs/settings.md` is compared with them by a test.
Must not know what a setting changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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

__all__ = ["CONFIG_FILE", "SECTIONS", "STAGES", "Settings", "sizes_of", "split", "unknown_variables"]

CONFIG_FILE = "anychip.toml"
_PREFIX = "ANYCHIP_"
_OF_OTHERS = re.compile(
    "KEY|URL|TORCH|TORCH_INDEX|EXTRAS|HASHES|IMAGE|MODEL_DIR|ADDRESS|PUBLISHED_PORT|MEMORY|ENVIRONMENTS_CACHE"
    "|TIMELINE_FILE|TEST_.*|SERVICE_.*|PORT_.*"
)
"""Variables that are no settings: of clients, the set-up, Compose, tests and measurements, and those that Kubernetes
gives every pod of a service called anychip."""
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
    """Settings of the service. Frozen: read once, at the start."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), toml_file=CONFIG_FILE
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
        """Return the sources in order: command line, environment, file. The first that has a value wins."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return the environment's variables that look like settings and are none: misspelt, or removed."""
    written = {name: name.upper().removeprefix(_PREFIX) for name in names if name.upper().startswith(_PREFIX)}
    return sorted(
        name
        for name, setting in written.items()
        if setting.lower() not in Settings.model_fields and not _OF_OTHERS.fullmatch(setting)
    )
