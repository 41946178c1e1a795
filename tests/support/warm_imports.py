"""Imports of a service until it is ready, before any thread is started (tests/support/warm.py)."""

import gc
import importlib
import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # As `anychip` does, and
gc.disable()  # as `anychip serve` does meanwhile.

for name in (
    "uvloop",
    "app.cli",
    "app.main",
    "app.decoder.decoder",
    "app.decoding.pool",
    "app.fleet.process",
    "anychip_tools.verify.command",
):
    importlib.import_module(name)
gc.enable()
gc.freeze()  # A collection in a service would copy shared pages.
