"""`python -m torchstrategy`.

It says what this machine has, and whether a small step runs on each of its devices.
"""

import sys

from torchstrategy.testing._machine import main

if __name__ == "__main__":
    sys.exit(main())
