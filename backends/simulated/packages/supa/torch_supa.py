"""Stands in for Biren's torch_supa: a simulated Biren device, where ANYCHIP_SIMULATE asks for it."""

from __future__ import annotations

import sys

from backends.simulated.device import install

supa = install("supa")
sys.modules["torch_supa.supa"] = supa
