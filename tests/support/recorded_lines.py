"""Which lines of the package a test reaches in the processes that it calls.

`python -m tests.mistakes` asks for it: it sets `FOLDER` in the environment, and reads
what is there in the end. Nobody else pays for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = "TORCHSTRATEGY_TESTS_RECORD_LINES"
PREFIX = "process"  # of the files, one for each call in each process


@contextlib.contextmanager
def recorded_lines(test: str) -> Iterator[None]:
    """Records the lines that are reached inside as those of a test, if that is asked.

    What is recorded is written at once: the process is killed in the end.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield
        return
    import coverage

    import torchstrategy

    recorder = coverage.Coverage(
        data_file=str(Path(folder, PREFIX)),
        data_suffix=True,
        include=[f"{Path(torchstrategy.__file__).parent}/*"],
        config_file=False,
        context=test,
    )
    recorder.set_option("run:disable_warnings", ["no-data-collected"])
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
        recorder.save()
