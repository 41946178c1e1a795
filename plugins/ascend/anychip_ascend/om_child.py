"""Child process that loads a finished model (.om) on the first card: a file may end the process that loads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from anychip_ascend.acl import card
from anychip_ascend.om import OmProgram


def main(file: str) -> None:
    """Print the shapes of inputs and outputs, and the batch sizes; else an `error`."""
    try:
        own = card()
        own.set_device("npu:0")
        program = OmProgram(own, Path(file).read_bytes())
    except Exception as error:  # pyACL is missing, or refuses.
        print(json.dumps({"error": str(error)}))
        return
    ports = {name: [port.shape for port in getattr(program, name)] for name in ("inputs", "outputs")}
    print(json.dumps({**ports, "batch_sizes": program.batch_sizes}))
    program.close()


if __name__ == "__main__":
    main(sys.argv[1])
