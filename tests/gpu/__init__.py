"""What only a GPU shows: `python -m tests.gpu` runs it all in nine minutes.

It needs a machine with a GPU.

It needs pytest and what torch brings, and no installation: a copy of the repository is
enough.
"""
