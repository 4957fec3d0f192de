"""`python -m torchstrategy.testing.run train.py` runs a program without GPUs.

With `--devices 4` the program, which is one for GPUs, has four.
"""

from torchstrategy.testing._runner import main

if __name__ == "__main__":
    raise SystemExit(main())
