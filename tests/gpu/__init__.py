"""What only a GPU shows: `python -m tests.gpu` runs, on a machine with one, all that matters there, in nine minutes.

It needs pytest and what torch brings, and no installation: a copy of the repository is enough.
"""
