"""`python -m app` is `anychip`."""

import sys

from app.cli import main

# A spawned worker imports this module again under another name; only the command itself may run.
if __name__ == "__main__":
    sys.exit(main())
