"""What anychip asks of devices that are not there: the entry point `anychip.simulation`.

Owns: nothing. Must not be imported where nothing is simulated.
"""

from __future__ import annotations

from anychip_tools.null.backend import configure as configure_null
from anychip_tools.simulated import configure, configured
from anychip_tools.simulated.decoder import SimulatedDecoder
from anychip_tools.simulated.device import weigh

__all__ = ["configure", "configure_null", "image_decoder", "weigh"]


def image_decoder(device: str) -> SimulatedDecoder | None:
    """What decodes JPEG on a device; None where the simulation does not say that it does."""
    simulation, _ = configured()
    return SimulatedDecoder(device, simulation) if simulation.decode else None
