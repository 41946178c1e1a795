"""Stands in for Moore Threads' torch_musa: a simulated Moore Threads device, where ANYCHIP_SIMULATE asks for it."""

from __future__ import annotations

import sys

from backends.simulated.device import install

musa = install("musa")
sys.modules["torch_musa.musa"] = musa
