"""`python -m torchstrategy.testing.run train.py` runs a program for GPUs without any.

With `--devices 4`, the program sees four GPUs.
"""

from torchstrategy.testing._runner import main

if __name__ == "__main__":
    raise SystemExit(main())
