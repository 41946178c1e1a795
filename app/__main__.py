"""`python -m app` is `anychip`. Python itself looks for it in the current folder first."""

import sys

# A spawned process imports this module again under another name; only the command itself may run.
if __name__ == "__main__":
    from anychip_base.command import main

    sys.exit(main())
