"""Say how to run the image on this host: `anychip doctor --container`, for a host with nothing installed yet.

    python3 deploy/preflight.py ascend             # prints docker run
    python3 deploy/preflight.py ascend --helm      # the values of the chart, for nodes like this one
    python3 deploy/preflight.py rocm --compose     # lines for deploy/compose/.env

Owns: nothing; plugins/tools/anychip_tools/container.py does. Needs only the standard library.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "plugins" / "tools")]
    from anychip_tools.container import main

    main()
