"""Small mistakes, planted one at a time in the package: do the tests notice?

A test that no mistake fails holds nothing, and a mistake that no test finds could be
made tomorrow. `python -m tests.mistakes --help` lists the options. Without any, the
command answers for 240 mistakes, and takes some hours on two cores:

1. `reached`: it runs the tests once, and notes which test reaches which line.
2. `kinds`: it chooses mistakes, the same ones each time, spread over the files by their
   size. A mistake is one change that a tired person could make: a comparison turned
   round, a factor left out, a call removed.
3. `trials`: it plants each mistake in a process of its own, and runs the tests that
   reach the line until some of them fail.
4. `table`: it prints how many mistakes were found, by room and by depth of the tests.

The mistakes are planted in copies of the repository: yours is only read.
"""

import sys
from pathlib import Path

# What `pythonpath` in setup.cfg gives to tests.
_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "support")]
