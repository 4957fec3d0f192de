"""The gradients of one replica, as the step sees them.

What backward adds lies in the slot that autograd writes. What the step reads as `.grad` is the gradient of the whole
step, so the first read after a backward is a meeting; what it then does to the gradient that it was shown, or puts in
its place, is kept as its view until the replicas settle. See `_training/gradient_reducer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple, Protocol, final

import torch

from torchstrategy._core.torch_internals import (
    are_dense,
    hide_from_compiler,
    is_compiling,
    make_parameter,
    num_nodes,
    raw_grad,
    raw_grads,
    requires_grad_of,
    set_raw_grad,
    set_raw_grads,
    sizes,
    version,
)
from torchstrategy._execution.replica import Replica

READING = "the first read of a gradient (.grad) after backward"
PUTTING = "the assignment of a gradient (.grad) to a parameter that has a hook"
CLEARING = "clearing a gradient that a hook waits for, after backward"

_DATA: Any = torch.Tensor.data
_plain_data: Callable[[torch.Tensor], torch.Tensor] = _DATA.__get__
set_plain_data: Callable[[torch.Tensor, torch.Tensor], None] = _DATA.__set__


class GradientTotals(Protocol):
    """The gradients of all replicas together, as one replica uses them: `GradientReducer`, of the file above."""

    owners: list[torch.Tensor]
    names: list[str]
    accumulated: list[torch.Tensor | None]
    hooked: set[int]

    def accumulate(self, replica: int) -> None:
        """The replica has come to what settles gradients."""

    def reduce_in_step(self) -> None:
        """Settles at a meeting after which the step goes on."""

    def check_reads(self, reads: Sequence[Reads]) -> None:
        """Refuses what replicas have read too early."""


@final
class CurrentRun:
    """What all parameters of one replica know of the run that they are in.

    Between runs that is nothing: what has the gradients of all replicas has all parameters, and a parameter that had it
    would keep itself alive.
    """

    def __init__(self) -> None:
        self.gradients: ReplicaGradients | None = None


class ReplicaParameter(torch.nn.Parameter):
    """A parameter in one replica: a leaf of its own, whose `grad` is the gradient of the whole step.

    Autograd writes the replica's own gradient into the slot below `grad`, and operations on the parameter cost what
    they always cost: nothing but reading, setting and deleting `grad` goes through here. Outside a run it is a plain
    Parameter.
    """

    run = CurrentRun()
    position: int  # in the ledger
    delivers = False  # whether a gradient that comes between runs goes on to the owner
    counts = False  # whether its gradients are counted

    @staticmethod
    def over(data: torch.Tensor, requires_grad: bool) -> ReplicaParameter:
        """A local parameter over the memory of `data`."""
        parameter = make_parameter(ReplicaParameter, data, requires_grad)
        assert isinstance(parameter, ReplicaParameter)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:
        gradients = self.run.gradients
        # The compiler looks at a tensor's gradient too, and lets no other replica compile meanwhile.
        return raw_grad(self) if gradients is None or is_compiling() else gradients.read(self.position)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.run.gradients is None:
            set_raw_grad(self, value)
        else:
            self.run.gradients.write(self.position, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        # In a step: the same memory, but what is written there is counted, and so noticed.
        return _plain_data(self) if self.run.gradients is None else self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.run.gradients is not None:
            raise RuntimeError(written_in_replica(self.run.gradients.name(self.position)))
        set_plain_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        memo[id(self)] = copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class VisibleGradient(NamedTuple):
    """What a step was shown of a gradient, or put in its place; None: it cleared it."""

    gradient: torch.Tensor | None
    had_none: bool = False  # it cleared it when there was none, of this replica or so far
    version: int | None = None  # of what it was shown
    are_zeros: bool = False  # it cleared it, and left zeros that count what is written on them

    def is_as_shown(self, accumulated: torch.Tensor | None) -> bool:
        """Whether the step has done nothing to what it was shown.

        Torch does not count what is written through `.data`, or by NumPy. In host memory the numbers tell, of which no
        more are looked at than cost nothing.
        """
        shown = self.gradient
        if shown is None or accumulated is None or _version(shown) != self.version:
            return False
        if shown.device.type != "cpu" or accumulated.device.type != "cpu" or not are_dense([shown, accumulated]):
            return True
        some = slice(None, None, max(1, shown.numel() // _SAMPLE))
        return torch.equal(shown.detach().flatten()[some], accumulated.detach().flatten()[some])


class Reads(NamedTuple):
    """The parameters whose gradients a replica took for settled, and read without a meeting."""

    all: set[int]
    doubtful: set[int]  # since backward may have run before


CLEARED = VisibleGradient(None)
CLEARED_NOTHING = VisibleGradient(None, had_none=True)


# The C library gives what is free at the end of a thread's heap back to the kernel, which makes it anew, page by page,
# for the gradients of the next run. Backward makes those of the first few parameters last: the smallest of them is held
# back until then, so that the end of the heap is not free. Where gradients are large, their memory is for others.
_FEW = 4
_SAMPLE = 1 << 14
_MANY = 4096  # slots that can be looked at in a time that does not matter beside a meeting: 0.2 ms
_SMALL = 1 << 25  # bytes of all gradients of a replica


@final
class ReplicaGradients:
    """The gradients of one replica. Used on that replica's thread, and by `GradientReducer` while it stands still.

    Args:
        gradients: What it shares with the other replicas.
        parameters: This replica's parameters, in the order of their owners.
    """

    def __init__(self, gradients: GradientTotals, parameters: Sequence[ReplicaParameter]) -> None:
        self._totals = weakref.ref(gradients)  # which holds this
        self.replica: Replica | None = None  # None between runs
        self.parameters = list(parameters)
        self.visible: dict[int, VisibleGradient] = {}
        self.accumulated_here: set[int] = set()  # of which a gradient was handed in, to be settled next
        self.put: set[int] = set()  # of which the step put a gradient there itself
        self.with_graph: set[int] = set()  # of which a backward with create_graph=True has made a part
        # Since gradients were settled, of parameters whose owners have hooks: how often one was computed, and added.
        self.computed: dict[int, int] = {}
        self.added: dict[int, int] = {}
        self._held_back: torch.Tensor | None = None  # see `_FEW`
        known = (parameter.run for parameter in parameters if parameter.run is not ReplicaParameter.run)
        self._run = next(known, None) or CurrentRun()
        for index, parameter in enumerate(self.parameters):
            parameter.run, parameter.position = self._run, index
        self._shown: dict[int, weakref.ref[torch.Tensor]] = {}  # before gradients were settled
        self._reads: set[int] = set()  # since gradients were settled
        self._unlooked: set[int] = set()  # and since the last look at all slots
        self._last_read = self._num_nodes = -1
        self._num_looks = _MANY  # for how many slots there is time

    @property
    def totals(self) -> GradientTotals:
        gradients = self._totals()
        assert gradients is not None
        return gradients

    def enter(self, replica: Replica) -> None:
        """The step begins: what it does with gradients is noted here."""
        self.replica = replica
        self._run.gradients = self

    def read(self, index: int) -> torch.Tensor | None:
        """The gradient of one parameter, of the whole step: a meeting, unless it is settled as far as is known here.

        It is not if this replica ran backward since, of whichever parameters: it may have added to this one in another
        replica. Nor if the step has cleared, replaced or changed what it was shown, which may be with its own rows.
        """
        view = self.visible.get(index)
        if (view is not None and not view.is_as_shown(self.totals.accumulated[index])) or self._ran_backward(index):
            self._reduce(READING)
        else:
            self._reads.add(index)
        self._last_read = index
        return self._view(index)

    def _ran_backward(self, index: int) -> bool:
        """Whether backward has added to any parameter, as far as can be seen without a look at each in each read.

        All are looked at as long as that costs little; when the graph has grown since the last look, since most
        backwards come after a forward; and when a parameter is read again, which begins a new pass over them.
        `GradientReducer.check_reads` finds what that misses.
        """
        if self._has_local(index):
            return True
        nodes, is_read_again = num_nodes(), index in self._unlooked and index != self._last_read
        if self._num_looks > 0 or is_read_again or nodes != self._num_nodes:
            self._num_looks -= len(self.parameters)
            self._num_nodes = nodes
            self._unlooked.clear()
            return not {type(None)}.issuperset(map(type, raw_grads(self.parameters)))
        self._unlooked.add(index)
        return False

    def _reduce(self, point: str) -> None:
        assert self.replica is not None
        gradients = self.totals

        def combine(brought: Sequence[Reads]) -> list[None]:
            gradients.check_reads(brought)
            gradients.reduce_in_step()
            return [None] * len(brought)

        self.accumulate()
        # Between what was read without a look, and a forward, there was no backward.
        unlooked = self._unlooked if num_nodes() == self._num_nodes else set()
        self.replica.synchronize(point, combine, Reads(self._reads, unlooked))

    def _let_hooks_see(self, indices: Sequence[int]) -> None:
        """What backward has made, hooks see before the step clears it: in plain PyTorch they saw it in backward."""
        if not self.totals.hooked.isdisjoint(indices) and self.local_indices():
            self._reduce(CLEARING)

    def write(self, index: int, value: torch.Tensor | None) -> None:
        """What `parameter.grad = value` means for the gradient of the whole step."""
        view = self.visible.get(index)
        if value is not None and view is not None and view.gradient is value:
            return  # `p.grad += x` has already changed the view in place
        is_hooked = index in self.totals.hooked
        if is_hooked:
            self._let_hooks_see([index])
            view = self.visible.get(index)
        was_shown = view is not None and view.gradient is not None
        if view is not None and view.are_zeros and view.gradient is not None:
            was_shown = _version(view.gradient) > 0
        if value is not None and was_shown:
            self.with_graph.discard(index)
            self.visible[index] = VisibleGradient(value)
            set_raw_grad(self.parameters[index], None)
        else:
            self.visible[index] = self._cleared(index)
            set_raw_grad(self.parameters[index], value)
            if value is not None:
                self.put.add(index)
                if is_hooked:  # no hook sees it, and it must not become one with what a backward adds
                    self._reduce(PUTTING)

    def clear(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Clears gradients as `zero_grad` does, without reading them."""
        self._let_hooks_see(indices)
        if set_to_none and not self.visible and not self.local_indices():  # as at the beginning of most steps
            accumulated = self.totals.accumulated
            self.visible = {index: CLEARED_NOTHING if accumulated[index] is None else CLEARED for index in indices}
            self.with_graph.difference_update(indices)
            return
        shown = [index for index in indices if self._has_local(index) or self._shows(index)]
        cleared = {index: self._cleared(index) for index in indices}
        if not set_to_none:
            zeros = {i: torch.zeros_like(self.own(i)) for i in shown}
            cleared.update((index, VisibleGradient(zero.detach(), are_zeros=True)) for index, zero in zeros.items())
        self.visible.update(cleared)
        for index in indices:
            if self._has_local(index):
                set_raw_grad(self.parameters[index], None)

    def accumulate(self) -> None:
        """The replica has come to a meeting that settles gradients: what it has collected can be added up."""
        assert self.replica is not None
        self.totals.accumulate(self.replica.index)

    def take_local(self) -> tuple[dict[int, torch.Tensor], bool]:
        """The local gradients, by parameter, and whether autograd made all of them; the slots are empty afterwards."""
        are_ours = not self.put
        taken = {index: local for index, local in enumerate(raw_grads(self.parameters)) if local is not None}
        if taken:
            set_raw_grads(self.parameters, repeat(None))
        if any(requires_grad_of(taken.values())):  # of a backward with create_graph=True
            self.with_graph.update(index for index, local in taken.items() if local.requires_grad)
            taken = {index: local.detach() for index, local in taken.items()}
            are_ours = False
        if len(taken) > _FEW and are_dense(taken.values()) and sum(sizes(taken.values())) < _SMALL:
            self._held_back = min(islice(taken.values(), _FEW), key=torch.Tensor.numel)
        return taken, are_ours

    def own(self, index: int) -> torch.Tensor:
        """This replica's parameter; or the owner, if only an optimizer has it: that of a layer that is gone."""
        return self.parameters[index] if index < len(self.parameters) else self.totals.owners[index]

    def name(self, index: int) -> str:
        """What the user calls a parameter."""
        return self.totals.names[index]

    def leave(self) -> None:
        """The run has ended."""
        self._run.gradients = self.replica = None
        self.reduced()
        self._shown.clear()
        self.with_graph.clear()
        self.added.clear()
        self.computed.clear()

    def reduced(self) -> None:
        """Gradients were settled: from here on, the step is shown them as they are now."""
        for index, view in self.visible.items():
            if view.gradient is not None and view.version is not None:
                self._shown[index] = weakref.ref(view.gradient)
        self.visible.clear()
        self.accumulated_here = set()
        self.put.clear()
        self._reads, self._unlooked = set(), set()
        self._last_read = self._num_nodes = -1
        self._num_looks = _MANY

    def show_again(self) -> None:
        """What the step was shown and has kept, it has as the gradient of now: in plain PyTorch it is one tensor."""
        shown, self._shown = self._shown, {}
        for index, reference in shown.items():
            accumulated, tensor = self.totals.accumulated[index], reference()
            if accumulated is not None and tensor is not None and _fits(tensor, accumulated):
                if tensor.data_ptr() == accumulated.data_ptr():  # of the first replica, whose it was
                    self.totals.accumulated[index] = accumulated.clone()
                with torch.no_grad():
                    tensor.copy_(accumulated)
                self.visible[index] = VisibleGradient(tensor, version=_version(tensor))

    def local_indices(self) -> set[int]:
        """Which parameters have local gradients."""
        return {
            index for index, local in enumerate(raw_grads(self.parameters)) if local is not None
        } | self.accumulated_here

    def _has_local(self, index: int) -> bool:
        return index < len(self.parameters) and raw_grad(self.parameters[index]) is not None

    def _shows(self, index: int) -> bool:
        """Whether the step would be shown a gradient of what was settled."""
        view = self.visible.get(index)
        return (self.totals.accumulated[index] if view is None else view.gradient) is not None

    def _cleared(self, index: int) -> VisibleGradient:
        """What clearing a gradient makes of the view of it."""
        self.with_graph.discard(index)
        view = self.visible.get(index)
        if self._has_local(index):
            return CLEARED
        if view is None:
            return CLEARED_NOTHING if self.totals.accumulated[index] is None else CLEARED
        return view if view.gradient is None else CLEARED

    def _view(self, index: int) -> torch.Tensor | None:
        view = self.visible.get(index)
        if view is not None:
            return view.gradient
        accumulated = self.totals.accumulated[index]
        if accumulated is None:
            return None
        shown = accumulated.to(self.parameters[index].device, copy=True)
        if index in self.with_graph:
            shown = _made_together(shown, self.name(index))
        self.visible[index] = VisibleGradient(shown, version=_version(shown))
        return shown


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else version(gradient)


def _fits(shown: torch.Tensor, gradient: torch.Tensor) -> bool:
    is_plain = not shown.requires_grad and are_dense([shown, gradient])
    return is_plain and shown.shape == gradient.shape and shown.dtype == gradient.dtype


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
        f"{name} was written in place in a replica, or on a thread that a replica started. Every replica would do so "
        "once, on memory that they may share or may not, and nothing would bring the copies together. Write on "
        "parameters after strategy.run, or in a merge function: get_replica_context().merge_call(lambda strategy: ...)."
    )


# A step that is compiled comes here where it reads, writes and clears gradients.
hide_from_compiler(ReplicaGradients.read)
hide_from_compiler(ReplicaGradients.write)
hide_from_compiler(ReplicaGradients.clear)
hide_from_compiler(ReplicaGradients.accumulate)
