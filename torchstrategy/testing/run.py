"""`python -m torchstrategy.testing.run --devices 4 train.py ...` runs a program for GPUs without any."""

from torchstrategy.testing._runner import main

if __name__ == "__main__":
    raise SystemExit(main())
