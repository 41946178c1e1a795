"""Stands in for Cambricon's torch_mlu: a simulated Cambricon device, where ANYCHIP_SIMULATE asks for it."""

from __future__ import annotations

import sys

from backends.simulated.device import install

mlu = install("mlu")
sys.modules["torch_mlu.mlu"] = mlu
