"""Steps that a program makes itself, without an optimizer of torch.

It writes on its parameters.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, addresses_of
from torchstrategy.testing._lints.evidence.places import Place

_aten = torch.ops.aten
WRITES = frozenset(
    {
        _aten.add_.Tensor,
        _aten.sub_.Tensor,
        _aten.mul_.Tensor,
        _aten.lerp_.Scalar,
        _aten.lerp_.Tensor,
        _aten.addcdiv_.default,
        _aten.addcmul_.default,
        _aten._foreach_add_.List,
        _aten._foreach_sub_.List,
        _aten._foreach_mul_.Scalar,
        _aten._foreach_mul_.List,
        _aten._foreach_addcdiv_.Scalar,
        _aten._foreach_addcdiv_.ScalarList,
        _aten._foreach_addcmul_.Scalar,
    }
)
"""With what programs update parameters.

`copy_` also puts other weights there: averages, or those of a checkpoint.
"""


@final
class OwnOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer that a rank does not have.

    Its parameters are those of the rank's losses.
    """

    # Not torch's, which would be told to lints.
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.defaults = {}
        self.state = defaultdict(dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group."""
        return [{"params": list(self._facts.parameters())}]

    @override
    def step(self, closure: Any = None) -> Any:
        """The program makes its steps."""
        raise NotImplementedError


@final
class OwnStep:
    """The step that a rank makes with the gradients of its last calls of `backward`.

    It begins before the first write on a parameter that has got one of these gradients.
    It is over when all of these parameters are written, or where something begins that
    comes after a step. What a program writes on parameters after that, as in a second
    loop over them, is seen with the next step.

    Attributes:
        optimizer: What lints are told as the optimizer.
        place: Where the last parameter was written; None if the step has not begun.
    """

    def __init__(self, facts: Facts) -> None:
        self.optimizer = OwnOptimizer(facts)
        self.place: Place | None = None
        # Parameters with a gradient, by their address.
        self._waiting: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all parameters are written."""
        return self.place is not None and not self._waiting

    def waits_for(self, parameters: Sequence[torch.Tensor]) -> None:
        """These have got gradients."""
        self._waiting |= {
            address_of(parameter): weakref.ref(parameter) for parameter in parameters
        }
        self._waiting.pop(0, None)

    def written(self, target: Any) -> list[torch.Tensor]:
        """Which parameters an operator will write for the first time in this step."""
        if not self._waiting:
            return []
        found = []
        for address in addresses_of(target):
            parameter = self._waiting[address]() if address in self._waiting else None
            # It may have got other memory.
            if parameter is not None and address_of(parameter) == address:
                del self._waiting[address]
                found.append(parameter)
        return found

    def ends(self) -> None:
        """It is over."""
        self.place = None
        self._waiting.clear()
