"""Variables: tensors that replicas share and assign, with what a strategy has to know of them."""

from torchstrategy._variables._kinds import (
    CentralVariable,
    Component,
    MirroredVariable,
    SharedVariable,
    SyncOnReadVariable,
)
from torchstrategy._variables._local import LocalVariable
from torchstrategy._variables._of_extended import VariablesOfExtended
from torchstrategy._variables._variable import Variable, is_variable

__all__ = [
    "CentralVariable",
    "Component",
    "LocalVariable",
    "MirroredVariable",
    "SharedVariable",
    "SyncOnReadVariable",
    "Variable",
    "VariablesOfExtended",
    "is_variable",
]
