"""The gradients of one replica, as its step sees them.

Backward adds to the local gradient, in the slot that autograd writes. The step reads as
`.grad` the gradient of the whole batch, so the first read after a backward is a
synchronization point. What the step then does to the gradient that it was shown, or
puts in its place, is kept as its visible gradient until gradients are reduced. See
`_copies/gradients/gradient_reducer`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar, final

import torch

from torchstrategy._base import torch_internals
from torchstrategy._base.context import without_autograd
from torchstrategy._base.marks import version_of
from torchstrategy._base.torch_internals import (
    num_nodes,
    raw_grad,
    raw_grads,
    set_raw_grad,
    take_raw_grads,
)
from torchstrategy._group.device_streams import NO_SIDE_STREAM
from torchstrategy._group.group import Replica
from torchstrategy._run.refusals import written_parameter
from torchstrategy._variables.variable import plain_data, set_plain_data


@final
class _HistoryEnd(torch.autograd.Function):
    """Copies a tensor.

    A backward through the copy raises an error, so that no gradient is lost without a
    word.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, why: str) -> torch.Tensor:
        ctx.why = why
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(ctx.why)


_end_history: Callable[[torch.Tensor, str], torch.Tensor] = _HistoryEnd.apply


def end_history(tensor: torch.Tensor, why: str) -> torch.Tensor:
    """A copy of a tensor without history that requires grad.

    So a loss of it runs a backward, which raises `why`.

    It does so in no_grad mode, too, in which `clip_grad_norm_` reads gradients.
    """
    with torch.enable_grad():
        return _end_history(tensor.requires_grad_(), why)


class EarlySender(Protocol):
    """Sends gradients to where they are added up while backward still makes others."""

    def offer(self, index: int) -> None:
        """Backward has added to the gradient of a parameter."""


class GradientTotals(Protocol):
    """What one replica uses of all replicas' gradients in a `GradientReducer`."""

    owners: list[torch.Tensor]
    names: list[str]
    accumulated: list[torch.Tensor | None]
    hooked: set[int]

    def accumulate(self, replica: int) -> None:
        """The replica has come to a synchronization point that reduces gradients."""

    def reduce_in_step(self, reads: Sequence[Reads]) -> list[None]:
        """Reduces gradients at a synchronization point after which the step goes on."""


@final
class CurrentRun:
    """The one object by which a replica's parameters know the run they are in."""

    # None between runs. `ReplicaGradients` refers to all parameters: a parameter that
    # referred to it all the time would keep itself alive until Python's collector of
    # cycles runs.
    gradients: ReplicaGradients | None = None


_BETWEEN_RUNS = CurrentRun()


@final
class LocalState:
    """What the library keeps of a parameter in one replica."""

    run = _BETWEEN_RUNS
    position: int  # among the parameters of the replica
    # Whether a gradient that comes between runs goes on to the user's parameter.
    delivers = False
    # What backward calls where it has added to the gradient.
    called: frozenset[Callable[..., None]] = frozenset()


P = TypeVar("P", bound="ReplicaParameter")


class ReplicaParameter(torch.nn.Parameter):
    """A parameter in one replica, whose `grad` is the gradient of the whole batch.

    It is a leaf of its own.

    Autograd writes the replica's local gradient into the slot below `grad`. Operations
    on the parameter cost what they cost on any parameter: only reading, setting and
    deleting `grad`, and `data`, go through this class. Outside a run it behaves as a
    plain Parameter.
    """

    # The `__dict__` of the parameter is for the attributes that the user sets on it, as
    # on any tensor. So what the library keeps is in a slot, under a name that no user
    # takes.
    __slots__ = ("torchstrategy_state",)
    torchstrategy_state: LocalState

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        # A step may make parameters with `type(parameter)(...)`. These are plain ones.
        return torch.nn.Parameter(data, requires_grad)

    @property
    def grad(self) -> torch.Tensor | None:
        state = self.torchstrategy_state
        gradients = state.run.gradients
        # The compiler looks at a tensor's gradient too, and lets no other replica
        # compile meanwhile.
        if gradients is None or torch_internals.is_compiling():
            return raw_grad(self)
        return gradients.read(state.position)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        state = self.torchstrategy_state
        if state.run.gradients is None:
            set_raw_grad(self, value)
        else:
            state.run.gradients.write(state.position, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        # In a step `.data` is the same memory with the parameter's version counter,
        # which torch's own `.data` lacks. So a write through it is counted, and refused
        # at the next synchronization point.
        is_between_runs = self.torchstrategy_state.run.gradients is None
        return plain_data(self) if is_between_runs else self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        state = self.torchstrategy_state
        if state.run.gradients is not None:
            raise RuntimeError(
                written_parameter(state.run.gradients.totals.names[state.position])
            )
        set_plain_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        memo[id(self)] = copied = torch.nn.Parameter(
            self.detach().clone(), self.requires_grad
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(protocol)


def make_local(kind: type[P], data: torch.Tensor, requires_grad: bool) -> P:
    """A parameter of a replica, of a class `kind`, over the memory of `data`."""
    local = torch_internals.make_parameter(kind, data, requires_grad)
    local.torchstrategy_state = LocalState()
    return local


def call_in_backward(
    parameter: ReplicaParameter,
    added: Callable[..., None],
    computed: Callable[..., None] | None = None,
) -> None:
    """From here on, backward calls functions for each gradient of a parameter.

    The hooks stay as long as the parameter: a later run does not add them again.

    Args:
        parameter: The parameter.
        added: Called with the parameter when backward has added the gradient.
        computed: Called before that, with the `CurrentRun`, the position of the
            parameter, and the gradient.
    """
    state = parameter.torchstrategy_state
    if added in state.called:
        return
    state.called |= {added}
    # A step may train a parameter that is frozen when the run begins.
    before = parameter.requires_grad
    parameter.requires_grad_()
    if computed is not None:
        torch_internals.on_computed(
            parameter, partial(computed, state.run, state.position)
        )
    torch_internals.on_gradient(parameter, added)
    parameter.requires_grad_(before)


def offer_gradient(parameter: torch.Tensor) -> None:
    """Backward added to a replica's parameter's gradient, which may be sent. A hook."""
    assert isinstance(parameter, ReplicaParameter)
    state = parameter.torchstrategy_state
    gradients = state.run.gradients
    if gradients is not None and gradients.sender is not None:
        gradients.sender.offer(state.position)


class VisibleGradient(NamedTuple):
    """The gradient that a step was shown, or has put in its place.

    It is None if the step cleared it.
    """

    gradient: torch.Tensor | None
    # The step cleared it when there was neither a local nor an accumulated gradient.
    had_none: bool = False
    version: int | None = None  # of the gradient, when the step was shown it
    # Of its numbers then; None: they are not compared.
    sample: torch.Tensor | None = None
    # The step cleared it to zeros; their version tells whether it has written on them
    # since.
    are_zeros: bool = False
    # In plain PyTorch it would be another tensor than before the step, or none.
    is_other: bool = False

    def was_written(self) -> bool:
        """Whether torch counted a write on the gradient since the step was shown it."""
        return (
            self.gradient is not None
            and self.version is not None
            and version_of(self.gradient) != self.version
        )

    def is_as_shown(self) -> bool:
        """Whether the step has not changed the gradient since it was shown.

        Torch does not count writes through `.data` or by NumPy. In the memory of the
        CPU the numbers are compared: a sample of them, so small that it costs nothing.
        """
        if (
            self.version is None
            or self.gradient is None
            or version_of(self.gradient) != self.version
        ):
            return False
        return self.sample is None or torch.equal(_sample(self.gradient), self.sample)


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.numel() <= _SAMPLE:
        return gradient
    return gradient.detach().flatten()[:: gradient.numel() // _SAMPLE]


class Reads(NamedTuple):
    """The parameters whose gradients a replica took for complete.

    It read them without a synchronization point.
    """

    all: set[int]
    # Those that were read without a look at all slots: a backward may have run before
    # the read.
    doubtful: set[int]


_NOT_SHOWN = VisibleGradient(None)
CLEARED = VisibleGradient(None, is_other=True)
CLEARED_NOTHING = VisibleGradient(None, had_none=True, is_other=True)


# The C library gives free memory at the end of a thread's heap back to the kernel,
# which then has to provide it again, page by page, for the gradients of the next run.
# Backward makes the gradients of the first few parameters last, so they lie at the end.
# The smallest of these few is kept until the next gradients are taken, and the heap
# does not shrink. Where the gradients of a replica are large (`_SMALL`), none is kept:
# others may need the memory.
_FEW = 4
_SAMPLE = 1 << 14  # numbers of a gradient that are compared, about
# Slots that can be looked at in 0.2 ms, which does not matter beside a synchronization
# point.
_MANY = 4096
_SMALL = 1 << 25  # bytes of all gradients of a replica


@final
class ReplicaGradients:
    """The gradients of one replica.

    Used on the replica's thread, and by `GradientReducer` while the replica waits.

    Args:
        gradients: The gradients of all replicas.
        parameters: This replica's parameters, in the order of the user's.
    """

    def __init__(
        self, gradients: GradientTotals, parameters: Sequence[ReplicaParameter]
    ) -> None:
        # A proxy, since it refers to this object: a strong reference would be a cycle.
        self.totals: GradientTotals = weakref.proxy(gradients)
        self.parameters = list(parameters)
        self.sender: EarlySender | None = None
        self._held_back: torch.Tensor | None = None  # see `_FEW`
        self._are_small = sum(torch_internals.sizes(self.parameters)) < _SMALL
        states = [parameter.torchstrategy_state for parameter in parameters]
        # Parameters that were in a run before know it by one object, and so do their
        # hooks.
        known = [state.run for state in states if state.run is not _BETWEEN_RUNS]
        self._run = known[0] if known else CurrentRun()
        for index, state in enumerate(states):
            state.run, state.position = self._run, index
        # Here and below, a parameter is meant by its position.
        self.visible: dict[int, VisibleGradient] = {}
        # What the step was shown before the last reduction.
        self._shown: dict[int, weakref.ref[torch.Tensor]] = {}
        self.leave()

    def leave(self) -> None:
        """The run has ended."""
        self.replica: Replica | None = None  # None between runs
        self._run.gradients = None
        self.note_reduction()
        self._shown.clear()
        # To whose gradients a backward with create_graph=True has added.
        self.with_graph: set[int] = set()
        # Of parameters on which the user has hooks: how often backward computed a
        # gradient, and how often it added one.
        self.computed: Counter[int] = Counter()
        self.added: Counter[int] = Counter()

    def note_reduction(self) -> None:
        """Gradients were reduced.

        From here on, the step is shown the accumulated gradients of now.
        """
        for index, view in self.visible.items():
            if view.gradient is not None and view.version is not None:
                self._shown[index] = weakref.ref(view.gradient)
        self.visible.clear()
        # Whose local gradients `accumulate` has added to the total.
        self.added_early: set[int] = set()
        self.put: set[int] = set()  # to which the step itself assigned a local gradient
        # Whose gradients were read without a synchronization point.
        self._reads: set[int] = set()
        # Those of them that were read since the last look at all slots.
        self._unlooked: set[int] = set()
        self._last_read = self._num_nodes = -1
        # How many slots may still be looked at; see `_ran_backward`.
        self._num_looks = _MANY

    def enter(self, replica: Replica) -> None:
        """The step begins.

        From here on `.grad` of this replica's parameters asks this object.
        """
        self.replica = replica
        self._run.gradients = self
        self.loss_factor: float | None = 1.0  # see `GradientsOfReplica`

    def on_callers_streams(self) -> AbstractContextManager[Any]:
        """A block in which this replica's thread works on the caller's streams."""
        assert self.replica is not None
        streams = self.replica.device_streams
        return NO_SIDE_STREAM if streams is None else streams.standing_still()

    def read(self, index: int) -> torch.Tensor | None:
        """The gradient of one parameter, of the whole batch.

        This is a synchronization point if it may be incomplete.

        It may be incomplete if this replica ran backward since the last reduction, on
        whichever parameters: backward may have added to this parameter in another
        replica. So it may if the step has cleared, replaced or changed the gradient
        that it was shown, since what the step put there may be of its own rows only.
        """
        # See Note [The states of a gradient].
        view = self.visible.get(index)
        if (view is not None and not view.is_as_shown()) or self._ran_backward(index):
            self._reduce("the first read of a gradient (.grad) after backward")
            view = self.visible.get(index)
        else:
            self._reads.add(index)
        self._last_read = index
        return self._show(index) if view is None else view.gradient

    def _ran_backward(self, index: int) -> bool:
        """Whether backward has added to any parameter, as far as that is cheap to know.

        A step usually reads `.grad` of each parameter in turn. To look at all slots in
        each of these reads would cost the square of their number. So all slots are
        looked at
        - for the first few reads, which costs little;
        - when autograd has made nodes since the last look, since a backward usually
          comes after a forward;
        - when a parameter is read again, which begins a new pass over the parameters.
        `GradientReducer.reduce_in_step` finds the reads for which that was not enough.
        """
        if raw_grad(self.parameters[index]) is not None:
            return True
        nodes, is_read_again = (
            num_nodes(),
            index in self._unlooked and index != self._last_read,
        )
        if self._num_looks > 0 or is_read_again or nodes != self._num_nodes:
            self._num_looks -= len(self.parameters)
            self._num_nodes = nodes
            self._unlooked.clear()
            return self.has_any_local()
        self._unlooked.add(index)
        return False

    def _reduce(self, point: str) -> None:
        assert self.replica is not None
        self.totals.accumulate(self.replica.index)
        # If autograd has made nodes since the last look at all slots, a forward came
        # after the reads, and the backward that made the local gradients came after
        # this forward. So the reads missed nothing.
        unlooked = self._unlooked if num_nodes() == self._num_nodes else set()
        self.replica.synchronize(
            point, self.totals.reduce_in_step, Reads(self._reads, unlooked)
        )

    def _let_hooks_see(self, indices: Sequence[int]) -> None:
        """Reduces gradients before the step clears some.

        So hooks see what backward has made.

        In plain PyTorch they saw it during backward.
        """
        if not self.totals.hooked.isdisjoint(indices) and self.local_indices():
            self._reduce("clearing a gradient that a hook waits for, after backward")

    def write(self, index: int, value: torch.Tensor | None) -> None:
        """Does what `parameter.grad = value` means for the whole batch's gradient."""
        # See Note [The states of a gradient].
        if value is not None and self.visible.get(index, _NOT_SHOWN).gradient is value:
            # `p.grad += x` has already changed the visible gradient in place, and
            # assigns the same tensor.
            return
        self._let_hooks_see([index])
        view = self.visible.get(index, _NOT_SHOWN)
        was_shown = view.gradient is not None and not (
            view.are_zeros and version_of(view.gradient) == 0
        )
        if value is not None and was_shown:
            self.with_graph.discard(index)
            self.visible[index] = VisibleGradient(value, is_other=True)
            set_raw_grad(self.parameters[index], None)
        else:
            self.visible[index] = self._clear_view(index)
            set_raw_grad(self.parameters[index], value)
            if value is not None:
                self.put.add(index)
                # The user's hooks must not see an assigned gradient: it is reduced now,
                # before a backward adds to it.
                if index in self.totals.hooked:
                    self._reduce(
                        "the assignment of a gradient (.grad) to a parameter that has "
                        "a hook"
                    )

    def clear(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Clears gradients as `zero_grad` does, without reading them."""
        self._let_hooks_see(indices)
        # Most steps begin with this, and have neither local nor visible gradients then.
        if set_to_none and not (
            self.visible or self.added_early or self.has_any_local()
        ):
            accumulated = self.totals.accumulated
            self.visible = {
                index: CLEARED_NOTHING if accumulated[index] is None else CLEARED
                for index in indices
            }
            self.with_graph.difference_update(indices)
            return
        cleared = {index: self._clear_view(index) for index in indices}
        for index in () if set_to_none else indices:
            gradient = self._find_shown_or_local(index)
            if gradient is not None:
                zeros = torch.zeros_like(
                    gradient.detach(), device=self.own(index).device
                )
                is_other = index in self.visible and self.visible[index].is_other
                cleared[index] = VisibleGradient(
                    zeros.detach(), are_zeros=True, is_other=is_other
                )
        self.visible.update(cleared)
        for index in indices:
            if self._has_local(index):
                set_raw_grad(self.parameters[index], None)

    def take_local(self) -> tuple[dict[int, torch.Tensor], bool]:
        """The local gradients, by parameter, and whether autograd made all of them.

        The slots are empty afterwards.
        """
        are_ours = not self.put
        taken = {
            index: local
            for index, local in enumerate(take_raw_grads(self.parameters))
            if local is not None
        }
        # After a backward with create_graph=True local gradients require grad. They are
        # added up without their graphs, and `_made_together_message` refuses a backward
        # through the sum.
        if any(torch_internals.requires_grad_of(taken.values())):
            self.with_graph.update(
                index for index, local in taken.items() if local.requires_grad
            )
            taken = {index: local.detach() for index, local in taken.items()}
            are_ours = False
        few = list(islice(taken.values(), _FEW))
        if self._are_small and len(taken) > _FEW and torch_internals.are_dense(few):
            self._held_back = min(few, key=torch.Tensor.numel)
        return taken, are_ours

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A block with a backward whose gradients do not count.

        Parameters that it reaches get zeros instead.
        """
        before = take_raw_grads(self.parameters)
        try:
            yield
        finally:
            with without_autograd(), torch_internals.unseen_by_function_modes():
                made = take_raw_grads(self.parameters)
                zeros = [
                    None if one is None else torch.zeros_like(one.detach())
                    for one in made
                ]
                kept = [
                    zero if one is None else one
                    for one, zero in zip(before, zeros, strict=True)
                ]
                torch_internals.set_raw_grads(self.parameters, kept)

    def own(self, index: int) -> torch.Tensor:
        """This replica's parameter.

        Or the user's own, if an optimizer has it and no module: that of a layer that
        the user has removed.
        """
        return (
            self.parameters[index]
            if index < len(self.parameters)
            else self.totals.owners[index]
        )

    def show_again(self) -> None:
        """Writes the accumulated gradients of now on tensors that the step has kept.

        The step was shown these tensors before.

        In plain PyTorch `.grad` is one tensor, to which backward adds.
        """
        shown, self._shown = self._shown, {}
        for index, reference in shown.items():
            accumulated, tensor = self.totals.accumulated[index], reference()
            if (
                accumulated is not None
                and tensor is not None
                and _fits(tensor, accumulated)
            ):
                # `_agreed` may have taken the very tensor of the first replica: the
                # step may write on it.
                if tensor.data_ptr() == accumulated.data_ptr():
                    self.totals.accumulated[index] = accumulated = accumulated.clone()
                with torch.no_grad():
                    tensor.copy_(accumulated)
                self.visible[index] = _note_shown(tensor, accumulated)

    def local_indices(self) -> set[int]:
        """Which parameters have local gradients."""
        return {
            index
            for index, local in enumerate(raw_grads(self.parameters))
            if local is not None
        } | self.added_early

    def has_any_local(self) -> bool:
        """Whether backward has added to a parameter since gradients were last taken.

        These are local gradients.
        """
        # Which is faster for parameters of a subclass.
        with torch_internals.unseen_by_function_modes():
            return not {type(None)}.issuperset(
                map(type, map(raw_grad, self.parameters))
            )

    def _has_local(self, index: int) -> bool:
        return (
            index < len(self.parameters)
            and raw_grad(self.parameters[index]) is not None
        )

    def _find_shown_or_local(self, index: int) -> torch.Tensor | None:
        """A gradient in the layout that the gradient has.

        That is sparse for an embedding with `sparse=True`.
        """
        view = self.visible.get(index)
        shown = self.totals.accumulated[index] if view is None else view.gradient
        return (
            raw_grad(self.parameters[index])
            if shown is None and self._has_local(index)
            else shown
        )

    def _clear_view(self, index: int) -> VisibleGradient:
        """The visible gradient after the step has cleared it."""
        self.with_graph.discard(index)
        return (
            self.visible.get(index, CLEARED_NOTHING)
            if self._find_shown_or_local(index) is None
            else CLEARED
        )

    def _show(self, index: int) -> torch.Tensor | None:
        """Shows the step the accumulated gradient of now."""
        accumulated = self.totals.accumulated[index]
        if accumulated is None:
            return None
        shown = accumulated.to(self.parameters[index].device, copy=True)
        if index in self.with_graph:
            # After a backward with `create_graph=True` a gradient requires grad: a loss
            # of it must not be ignored.
            shown = end_history(shown, _made_together_message(self.totals.names[index]))
        self.visible[index] = _note_shown(shown, accumulated)
        return shown


@final
class EarlyReads(NamedTuple):
    """Positions of parameters whose gradients were read too early.

    They were if somebody has a gradient to add.

    Args:
        doubtful: A replica without a gradient of it may have read it after a backward.
        idle: A replica that ran no backward has read it.
        unread: A replica that has a gradient of it has not read it. Together with
            `idle`, the read was too early: that replica ran a backward, read a gradient
            after it, and so came to the reduction. The idle one has read the same
            gradient without coming there, so it took for complete what the other one
            adds to now.
    """

    doubtful: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        of_replicas: Sequence[ReplicaGradients],
        reads: Sequence[Reads],
        names: Sequence[str],
    ) -> EarlyReads:
        """What the replicas of one worker tell the others.

        Args:
            of_replicas: The gradients of the replicas that are present.
            reads: What each of them has read.
            names: What to call the parameters in a message.

        Raises:
            RuntimeError: If one replica of this worker has read what another one still
                had to add to. The parameter and the replicas are named.
        """
        local = [of_replica.local_indices() for of_replica in of_replicas]
        doubtful: set[int] = set()
        idle: set[int] = set()
        unread: set[int] = set()
        for own, read in zip(local, reads, strict=True):
            doubtful |= read.doubtful - own
            unread |= own - read.all
            if not own:
                idle |= read.all
        missed = set().union(*local) & (doubtful | (idle & unread))
        if missed:
            index = min(missed)
            ids = [one.replica.index for one in of_replicas if one.replica is not None]
            adder = next(r for r, own in zip(ids, local, strict=True) if index in own)
            for reader, own, read in zip(ids, local, reads, strict=True):
                has_read_idly = not own and index in read.all and index in unread
                if has_read_idly or index in read.doubtful - own:
                    raise RuntimeError(
                        _TOO_EARLY.format(reader=reader, name=names[index], adder=adder)
                    )
        return cls(frozenset(doubtful), frozenset(idle), frozenset(unread))


def _note_shown(shown: torch.Tensor, accumulated: torch.Tensor) -> VisibleGradient:
    is_compared = (
        accumulated.is_cpu
        and shown.is_cpu
        and shown.layout is accumulated.layout is torch.strided
    )
    return VisibleGradient(
        shown,
        version=version_of(shown),
        sample=_sample(accumulated) if is_compared else None,
    )


def _fits(shown: torch.Tensor, gradient: torch.Tensor) -> bool:
    is_plain = not shown.requires_grad and torch_internals.are_dense([shown, gradient])
    return is_plain and shown.shape == gradient.shape and shown.dtype == gradient.dtype


def _made_together_message(name: str) -> str:
    return (
        f"This backward goes through {name}.grad, which replicas have made together, "
        "so none of them can differentiate it. Take the gradients of its own rows by "
        "torch.autograd.grad(loss, parameters, create_graph=True), and those of the "
        "batch by get_replica_context().all_reduce of these: a backward goes through "
        "both."
    )


def stray_gradient_message(name: str) -> str:
    """The message for a gradient that came to one of the user's own parameters."""
    return (
        f"Backward in a replica reached {name} itself, and not the replica's own "
        "parameter: every replica would add to one gradient, with no weight. The step "
        "uses a module that was not created in strategy.scope(), a trainable tensor in "
        "no module, a list of parameters made outside of the step, or a thread that it "
        "starts, where names mean your own objects. Create the module in the scope, or "
        "give it to strategy.distribute_module(module); put the tensor into such a "
        "module; call model.parameters() in the step, and backward on its thread."
    )


_TOO_EARLY = (
    "Replica {reader} read the gradient of {name} to which replica {adder} still had "
    "to add: a replica that did not use the parameter ran no backward, or backward ran "
    "twice in one without a new forward or a read of all gradients. Run backward in "
    "every replica, (outputs.sum() * 0).backward() where there is no loss; or read "
    "after strategy.run."
)


# A compiled step calls these where it reads, writes and clears gradients. A compiler
# that traced them would bake the state of one call into its graph.
torch_internals.hide_from_compiler(ReplicaGradients.read)
torch_internals.hide_from_compiler(ReplicaGradients.write)
torch_internals.hide_from_compiler(ReplicaGradients.clear)
