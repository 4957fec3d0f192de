"""What a worker asks of the others has an answer of its own where there are others."""

from __future__ import annotations

import inspect
import sys

import pytest

from torchstrategy._group.processes.process_group import ProcessGroup
from torchstrategy._group.workers import Workers


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not mark what is final"
)
def test_a_group_of_processes_overrides_each_method_of_a_lone_process() -> None:
    """A forgotten method would answer for this process alone, and nobody would see."""
    of_lone = {
        name: method
        for name, method in vars(Workers).items()
        if inspect.isfunction(method)
    }
    forgotten = {
        name
        for name, method in of_lone.items()
        if not getattr(method, "__final__", False)
        and name not in vars(ProcessGroup)
        and name != "__init__"
    }
    assert len(of_lone) > 10 and not forgotten
