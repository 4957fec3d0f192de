"""A variable of a module, in one replica."""

from __future__ import annotations

import weakref
from typing import Any, final

import numpy
import torch

from torchstrategy._core.torch_internals import make_parameter
from torchstrategy._training.replica_gradients import ReplicaParameter
from torchstrategy._variables.variable import Variable

_OF_VARIABLES = frozenset(
    {"aggregation", "assign", "assign_add", "assign_sub", "read_value", "synchronization", "trainable"}
)


@final
class ReplicaVariable(ReplicaParameter):
    """A replica's own copy of a variable: a parameter that can be assigned as the variable is."""

    # Weak, since copies stay between runs, and the variable lives only as long as the user has a reference to it.
    variable: weakref.ref[Variable]

    @staticmethod
    def of(variable: Variable, data: torch.Tensor, requires_grad: bool) -> ReplicaVariable:
        """The copy of `variable` over the memory of `data`."""
        local = make_parameter(ReplicaVariable, data, requires_grad)
        assert isinstance(local, ReplicaVariable)
        local.variable = weakref.ref(variable)
        return local

    @property
    def name(self) -> str:
        return self._variable.name

    def numpy(self, *, force: bool = False) -> numpy.ndarray[Any, Any]:
        return self._variable.numpy(force=force)

    def __getattr__(self, name: str) -> Any:
        # A method of the user's variable acts for the replica that calls it: the variable asks whose thread it is on.
        if name in _OF_VARIABLES:
            return getattr(self._variable, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _variable(self) -> Variable:
        variable = self.variable()
        assert variable is not None, "the run holds the variables of its strategy"
        return variable
