"""The gradients of one replica, as the step sees them.

What backward adds lies in the slot that autograd writes. What the step reads as `.grad` is the gradient of the whole
step, so the first read after a backward is a meeting; what it then does to the gradient that it was shown, or puts in
its place, is kept as its view until the replicas settle. See `_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from torchstrategy._replica import Replica
from torchstrategy._torch import is_compiling, make_parameter, requires_grad_of, set_slot, set_slots, sizes, slot, slots

if TYPE_CHECKING:
    from torchstrategy._gradients import Gradients

READING = "the first read of a gradient (.grad) after backward"

_DATA: Any = torch.Tensor.data
_plain_data: Callable[[torch.Tensor], torch.Tensor] = _DATA.__get__
set_plain_data: Callable[[torch.Tensor, torch.Tensor], None] = _DATA.__set__


class LocalParameter(torch.nn.Parameter):
    """A parameter in one replica: a leaf of its own, whose `grad` is the gradient of the whole step.

    Autograd writes the replica's own gradient into the slot below `grad`, and operations on the parameter cost what
    they always cost: nothing but reading, setting and deleting `grad` goes through here. Outside a run it is a plain
    Parameter.
    """

    ledger: ReplicaLedger | None = None
    position: int  # in the ledger
    delivers = False  # whether a gradient that comes between runs goes on to the owner
    delivers_together = False  # with those of the other replicas, since the owner has hooks
    counts = False  # whether its gradients are counted

    @staticmethod
    def over(data: torch.Tensor, requires_grad: bool) -> LocalParameter:
        """A local parameter over the memory of `data`."""
        parameter = make_parameter(LocalParameter, data, requires_grad)
        assert isinstance(parameter, LocalParameter)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:
        # The compiler looks at a tensor's gradient too, and lets no other replica compile meanwhile.
        if self.ledger is None or self.ledger.replica is None or is_compiling():
            return slot(self)
        return self.ledger.read(self.position)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.ledger is None or self.ledger.replica is None:
            set_slot(self, value)
        else:
            self.ledger.write(self.position, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        # In a step: the same memory, but what is written there is counted, and so noticed.
        return _plain_data(self) if self.ledger is None or self.ledger.replica is None else self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.ledger is not None and self.ledger.replica is not None:
            raise RuntimeError(written_in_replica(self.ledger.name(self.position)))
        set_plain_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        memo[id(self)] = copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class View(NamedTuple):
    """What a step was shown of a gradient, or put in its place; None: it cleared it."""

    gradient: torch.Tensor | None
    had_none: bool = False  # it cleared it when there was none, of this replica or so far


CLEARED = View(None)
CLEARED_NOTHING = View(None, had_none=True)


# The C library gives what is free at the end of a thread's heap back to the kernel, which makes it anew, page by page,
# for the gradients of the next run. Backward makes those of the first few parameters last: the smallest of them is held
# back until then, so that the end of the heap is not free. Where gradients are large, their memory is for others.
_FEW = 4
_SMALL = 1 << 25  # bytes of all gradients of a replica


@final
class ReplicaLedger:
    """The gradients of one replica. Used on that replica's thread, and by `Gradients` while it stands still.

    Args:
        gradients: What it shares with the other replicas.
        parameters: This replica's parameters, in the order of their owners.
    """

    def __init__(self, gradients: Gradients, parameters: Sequence[LocalParameter]) -> None:
        self.replica: Replica | None = None  # None between runs
        self.parameters = list(parameters)
        self.views: dict[int, View] = {}
        self.handed_in: set[int] = set()  # of which a gradient was handed in, to be settled next
        self.seen: set[int] = set()  # read since the last look at all slots, and not local then
        self._held_back: torch.Tensor | None = None  # see `_FEW`
        self.put: set[int] = set()  # of which the step put a gradient there itself
        self.with_graph: set[int] = set()  # of which a backward with create_graph=True has made a part
        self.added: dict[int, int] = {}  # how often backward added to a counted parameter since gradients were settled
        self.gradients = gradients
        for index, parameter in enumerate(self.parameters):
            parameter.ledger, parameter.position = self, index

    def read(self, index: int) -> torch.Tensor | None:
        """The gradient of one parameter, of the whole step. A meeting if this replica has local gradients.

        To know that, all slots would have to be looked at in every read. They are looked at when a parameter is read
        for the second time, which begins a new pass over the parameters; `Gradients.check_reads` finds what that
        misses.
        """
        assert self.replica is not None
        has_local = slot(self.parameters[index]) is not None
        if not has_local and (index in self.seen or not self.seen):
            self.seen.clear()
            has_local = bool(self.local_indices())
        if has_local:
            gradients = self.gradients

            def combine(brought: Sequence[set[int]]) -> list[None]:
                gradients.check_reads(brought)
                gradients.settle()
                return [None] * len(brought)

            self.hand_in()
            self.replica.meet(READING, combine, set(self.seen))
            self.seen.clear()
        self.seen.add(index)
        return self._view(index)

    def write(self, index: int, value: torch.Tensor | None) -> None:
        """What `parameter.grad = value` means for the gradient of the whole step."""
        view = self.views.get(index)
        if value is not None and view is not None and view.gradient is value:
            return  # `p.grad += x` has already changed the view in place
        was_shown = view is not None and view.gradient is not None
        if value is not None and was_shown:
            self.with_graph.discard(index)
            self.views[index] = View(value)
            set_slot(self.parameters[index], None)
        else:
            self.views[index] = self._cleared(index)
            set_slot(self.parameters[index], value)
            if value is not None:
                self.put.add(index)

    def clear(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Clears gradients as `zero_grad` does, without reading them."""
        if set_to_none and not self.views and not self.local_indices():  # as at the beginning of most steps
            so_far = self.gradients.so_far
            self.views = {index: CLEARED_NOTHING if so_far[index] is None else CLEARED for index in indices}
            self.with_graph.difference_update(indices)
            return
        shown = [index for index in indices if self._has_local(index) or self._shows(index)]
        cleared = {index: self._cleared(index) for index in indices}
        if not set_to_none:
            zeros = {i: torch.zeros_like(self.own(i)) for i in shown}
            cleared.update((index, View(zero.detach())) for index, zero in zeros.items())
        self.views.update(cleared)
        for index in indices:
            if self._has_local(index):
                set_slot(self.parameters[index], None)

    def hand_in(self) -> None:
        """The replica has come to a meeting that settles gradients: what it has collected can be added up."""
        assert self.replica is not None
        self.gradients.hand_in(self.replica.index)

    def take_local(self) -> tuple[dict[int, torch.Tensor], bool]:
        """The local gradients, by parameter, and whether autograd made all of them; the slots are empty afterwards."""
        are_ours = not self.put
        self.put.clear()
        taken = {index: local for index, local in enumerate(slots(self.parameters)) if local is not None}
        if taken:
            set_slots(self.parameters, repeat(None))
        if any(requires_grad_of(taken.values())):  # of a backward with create_graph=True
            self.with_graph.update(index for index, local in taken.items() if local.requires_grad)
            taken = {index: local.detach() for index, local in taken.items()}
            are_ours = False
        if len(taken) > _FEW and sum(sizes(taken.values())) < _SMALL:
            self._held_back = min(islice(taken.values(), _FEW), key=torch.Tensor.numel)
        return taken, are_ours

    def own(self, index: int) -> torch.Tensor:
        """This replica's parameter; or the owner, if only an optimizer has it: that of a layer that is gone."""
        return self.parameters[index] if index < len(self.parameters) else self.gradients.owners[index]

    def name(self, index: int) -> str:
        """What the user calls a parameter."""
        return self.gradients.names[index]

    def count(self, index: int) -> None:
        """Notes that backward has added to the gradient of a parameter."""
        self.added[index] = self.added.get(index, 0) + 1

    def let_go(self) -> None:
        """Breaks the circle of parameters and ledger."""
        for parameter in self.parameters:
            parameter.ledger = None
        self.parameters = []
        self._held_back = None

    def leave(self) -> None:
        """The run has ended."""
        self.replica = None
        self.views.clear()
        self.handed_in = set()
        self.put.clear()
        self.seen.clear()
        self.with_graph.clear()
        self.added.clear()

    def local_indices(self) -> set[int]:
        """Which parameters have local gradients."""
        return {index for index, local in enumerate(slots(self.parameters)) if local is not None} | self.handed_in

    def _has_local(self, index: int) -> bool:
        return index < len(self.parameters) and slot(self.parameters[index]) is not None

    def _shows(self, index: int) -> bool:
        """Whether the step would be shown a gradient of what was settled."""
        view = self.views.get(index)
        return (self.gradients.so_far[index] if view is None else view.gradient) is not None

    def _cleared(self, index: int) -> View:
        """What clearing a gradient makes of the view of it."""
        self.with_graph.discard(index)
        view = self.views.get(index)
        if self._has_local(index):
            return CLEARED
        if view is None:
            return CLEARED_NOTHING if self.gradients.so_far[index] is None else CLEARED
        return view if view.gradient is None else CLEARED

    def _view(self, index: int) -> torch.Tensor | None:
        view = self.views.get(index)
        if view is not None:
            return view.gradient
        so_far = self.gradients.so_far[index]
        if so_far is None:
            return None
        shown = so_far.to(self.parameters[index].device, copy=True)
        if index in self.with_graph:
            shown = _made_together(shown, self.name(index))
        self.views[index] = View(shown)
        return shown


@final
class _MadeTogether(torch.autograd.Function):
    """A gradient after a backward with `create_graph=True`: it requires grad, so that a loss of it is not ignored."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            f"This backward goes through {ctx.name}.grad, which replicas have made together, of all their rows: none "
            "of them can differentiate it. Get the gradients of the replica's own rows from torch.autograd.grad(loss, "
            "parameters, create_graph=True), and those of the whole batch from get_replica_context().all_reduce of "
            "these: a backward goes through both."
        )


_apply_made_together: Callable[..., torch.Tensor] = _MadeTogether.apply


def _made_together(gradient: torch.Tensor, name: str) -> torch.Tensor:
    with torch.enable_grad():  # clipping reads gradients without
        return _apply_made_together(gradient.requires_grad_(), name)


def written_in_replica(name: str) -> str:
    """The message for a parameter on which a step wrote in place."""
    return (
        f"{name} was written in place in a replica. Every replica would do so once, on memory that they may share or "
        "may not, and nothing would bring the copies together. Write on parameters after strategy.run, or in a "
        "merge function: get_replica_context().merge_call(lambda strategy: ...)."
    )
