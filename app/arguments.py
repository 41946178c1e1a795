"""Options that several commands share: those made of the settings, and the error every command may raise.

Owns: how a setting becomes an option. Must not import torch: `anychip --help` has to answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from app.config import CONFIG_FILE, Settings


class CommandError(Exception):
    """Failure of a command; the message is one plain sentence."""


def add_settings(parser: argparse._ActionsContainer, names: Sequence[str]) -> None:
    """Give the parser an option for each of these settings. Help text and default come from the setting.

    A switch may stand without a value, so a command with such a setting can have no positional arguments.
    """
    for name in names:
        field = Settings.model_fields[name]
        switch = field.annotation is bool
        shown = str(field.default).lower() if switch else str(field.default)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"setting_{name}",
            default=None,
            nargs="?" if switch else None,
            const="true" if switch else None,
            metavar="true|false" if switch else name.upper(),
            help=f"{field.description}{f' (default: {shown})' if shown else ''}".replace("%", "%%"),
        )


def read_settings(parsed: argparse.Namespace, **overrides: str) -> Settings:
    """Read a command's settings: from the command line, then `overrides`, then environment, file and defaults.

    Raises pydantic's ValidationError, CommandError for a file that is no TOML or a folder that is not there.
    """
    given: dict[str, str] = {
        name.removeprefix("setting_"): value
        for name, value in vars(parsed).items()
        if name.startswith("setting_") and value is not None
    }
    try:
        settings = Settings(**{**overrides, **given})  # type: ignore[arg-type]  # pydantic reads every type from text.
    except ValidationError:
        raise
    except ValueError as error:  # Of the file's TOML, or of its bytes.
        raise CommandError(f"{CONFIG_FILE} is no TOML in UTF-8: {error}") from None
    if settings.calibrate and not Path(settings.calibrate).is_dir():  # Not in Settings: children read theirs later.
        raise CommandError(f"--calibrate {settings.calibrate} is no folder")
    return settings
