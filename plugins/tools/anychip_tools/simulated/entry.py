"""Entry point `anychip.simulation`: the functions that anychip calls for simulated devices.

Owns: nothing. Must not be imported where nothing is simulated.
"""

from __future__ import annotations

from anychip_tools.null.backend import configure as configure_null
from anychip_tools.simulated import configure, configured
from anychip_tools.simulated.decoder import SimulatedDecoder
from anychip_tools.simulated.device import weigh

__all__ = ["configure", "configure_null", "image_decoder", "weigh"]


def image_decoder(device: str) -> SimulatedDecoder | None:
    """Return the JPEG decoder of a device; None if the simulation has none."""
    simulation, _ = configured()
    return SimulatedDecoder(device, simulation) if simulation.decode else None
