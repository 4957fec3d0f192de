"""Which of two ways several replicas of a process use the program's objects.

`TORCHSTRATEGY_TURNS=1` lets them take turns on the objects. Else each has copies.
"""

from __future__ import annotations

import os

from torchstrategy._copies.replicated_storage import ReplicatedStorage
from torchstrategy._run.placement import Placement
from torchstrategy._run.storage import Storage
from torchstrategy._turns.storage import SharedObjects

IN_TURNS = os.environ.get("TORCHSTRATEGY_TURNS") == "1"


def storage_of_several(placement: Placement) -> Storage:
    """The storage of a strategy with several replicas in this process.

    Args:
        placement: Where the replicas are.
    """
    # Several workers exchange what copies have made.
    if IN_TURNS and placement.workers.count == 1:
        return SharedObjects(placement)
    return ReplicatedStorage(placement)
