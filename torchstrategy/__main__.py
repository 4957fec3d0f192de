"""`python -m torchstrategy` prints what this machine has.

It also says whether a small step runs on each device.
"""

import sys

from torchstrategy.testing._machine import main

if __name__ == "__main__":
    sys.exit(main())
