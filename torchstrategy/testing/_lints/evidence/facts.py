"""What each rank has done since its last step, for lints of all kinds."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from torchstrategy.testing._lints.evidence.asking import entry_of
from torchstrategy.testing._lints.evidence.known import Known, is_plain
from torchstrategy.testing._lints.evidence.losses import Term
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here

_DEEPEST = 4  # lists in lists


@final
@dataclass
class Model:
    """A `DistributedDataParallel`.

    Attributes:
        model: It, while it is there.
        key: The same for its copies in all ranks.
        ranks: Who has copies.
    """

    model: weakref.ref[Any]
    key: tuple[Any, ...]
    ranks: tuple[int, ...]


@final
@dataclass
class Backward:
    """A call of `backward`.

    Attributes:
        place: Where it was called.
        way: Through which lines.
        terms: Of what the loss is made.
        is_plain: Whether it had no gradient of the caller's, and did not keep its graph
            for another call.
        changed: The parameters, by id, whose gradients it has changed.
        scale: By what mixed precision has multiplied the loss; None if by nothing.
        is_given: Whether it was `torch.autograd.grad`, which adds to no gradient.
    """

    place: Place
    way: tuple[Place, ...]
    terms: Sequence[Term]
    is_plain: bool
    changed: set[int]
    scale: float | None = None
    is_given: bool = False


@final
class Factor(NamedTuple):
    """By what a gradient was multiplied, and where it was last.

    The number is None if nobody knows it.
    """

    number: float | None
    place: Place


@final
@dataclass
class Flat:
    """A tensor in which the program has put gradients together.

    Attributes:
        parts: Their addresses, in order.
        factor: By what it was multiplied; None if by nothing.
        is_reduced: Whether it was reduced.
    """

    parts: dict[int, None]
    factor: Factor | None = None
    is_reduced: bool = False

    def multiplies(self, number: float | None, place: Place) -> None:
        """The program multiplies it; by None: nobody knows by what."""
        self.factor = Factor(
            _product(1.0 if self.factor is None else self.factor.number, number), place
        )


@final
@dataclass
class Facts:
    """What one rank has done, or a program without ranks, which is rank -1.

    Attributes:
        rank: Which rank.
        size: How many there are.
        models: Its models of `DistributedDataParallel`.
        optimizers: Its optimizers.
        leaves: Parameters of losses, by id, where no optimizer was made since lints
            watch.
        steps: How many steps it has made. Steps of an optimizer within those of another
            one do not count.
        scale: The scale of mixed precision; None if there is none.
        skips: How many steps `GradScaler` has skipped.
        stepping: The optimizer that makes a step now. What it does to gradients and
            parameters is its own.

        backwards: The calls of `backward` since the last step, or since gradients were
            zeroed.
        called: The keys of models that were called since the last step, to be trained.
        synchronized: The keys of those that were called outside of `no_sync`.
        left_open: The keys of those whose last call was in `no_sync`.
        gradients: Where gradients were after the last `backward`: the address by the id
            of the parameter.
        addresses: All of these addresses.
        factors: By what gradients were multiplied since then, by their address.
        clipped: By what `clip_grad_norm_` multiplied them, which `factors` leaves out.
        flats: What the program has put together of gradients, as one tensor.
        reduced: How gradients were reduced by collectives of the program, by their
            address.
        reducers: Among whom that was.
        apart: The addresses of gradients that were reduced in a flat tensor, and that
            are as they were.
        was_awaited: Whether the step has read no gradient that a collective has still
            to write.
        has_had_optimizers: Whether it has had some, which may be gone.
        given: What `torch.autograd.grad` has returned, by the id of the parameter,
            where there is no optimizer.
        used: With what gradients a step of the program's own has changed parameters, by
            their id.
    """

    rank: int
    size: int
    models: list[Model] = field(default_factory=list)
    optimizers: Objects[torch.optim.Optimizer, None] = field(default_factory=Objects)
    leaves: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    steps: int = 0
    scale: float | None = None
    skips: int = 0
    stepping: torch.optim.Optimizer | None = None
    backwards: list[Backward] = field(default_factory=list)
    called: set[Any] = field(default_factory=set)
    synchronized: set[Any] = field(default_factory=set)
    left_open: set[Any] = field(default_factory=set)
    gradients: dict[int, int] = field(default_factory=dict)
    addresses: set[int] = field(default_factory=set)
    factors: dict[int, Factor] = field(default_factory=dict)
    clipped: dict[int, Factor] = field(default_factory=dict)
    flats: Known[Flat] = field(default_factory=Known)
    reduced: dict[int, str] = field(default_factory=dict)
    reducers: tuple[int, ...] = ()
    apart: set[int] = field(default_factory=set)
    was_awaited: bool = True
    has_had_optimizers: bool = False
    given: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    used: dict[int, Any] = field(default_factory=dict)

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of all optimizers; while there are none, of losses."""
        for optimizer in list(self.optimizers):
            yield from parameters_of(optimizer)
        if not self.optimizers:
            there = [leaf() for leaf in self.leaves.values()]
            yield from (leaf for leaf in there if leaf is not None)

    def add_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Notes leaves of losses.

        An input with a gradient does not count beside the parameters of a model: it is
        written for an attack, say, and not to train.
        """
        there = {own: leaf for own, leaf in self.leaves.items() if leaf() is not None}
        there |= {id(leaf): weakref.ref(leaf) for leaf in leaves}
        parameters = {
            own: leaf
            for own, leaf in there.items()
            if isinstance(leaf(), torch.nn.Parameter)
        }
        self.leaves = parameters or there

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter: its own, or what `torch.autograd.grad` gave."""
        if parameter.grad is not None:
            return parameter.grad
        given = self.given.get(id(parameter))
        return None if given is None else given()

    def address_of_gradient(self, parameter: torch.Tensor) -> int:
        """Where its gradient of the last `backward` is; 0 if the program replaced that.

        Those of `torch.autograd.grad` may be gone: a program may keep what it has put
        together of them alone. Another tensor may be where the gradient of another
        parameter was.
        """
        made = self.gradients.get(id(parameter), 0)
        is_given = parameter.grad is None and id(parameter) in self.given
        return made if is_given or address_of(parameter.grad) == made else 0

    def gradients_in(self, written: Any) -> set[int]:
        """The addresses of gradients in the tensor or tensors an operator writes."""
        return self.addresses.intersection(addresses_of(written)) - {0}

    def puts_together(self, flat: torch.Tensor, parts: Sequence[Any]) -> None:
        """Notes which gradients a tensor has copies of.

        Some parts were written beside each other.
        """
        gradients = [
            address
            for address in addresses_of(parts)
            if address in self.addresses and address
        ]
        if gradients and self.stepping is None:
            before = self.flats.get(flat)
            self.flats.put(
                flat,
                Flat(
                    ({} if before is None else before.parts) | dict.fromkeys(gradients)
                ),
            )

    def reduces(self, tensor: torch.Tensor, detail: str, ranks: Sequence[int]) -> None:
        """A collective of the program reduces a tensor: gradients, maybe."""
        address, flat = address_of(tensor), self.flats.get(tensor)
        if address in self.addresses:
            self.apart.discard(address)
            if address in self.reduced:  # once more, among other ranks
                self.multiplies([address], None, here())
            self.reduced[address] = detail
        elif flat is not None:
            self.apart |= flat.parts.keys() - self.reduced.keys()
            self.reduced = dict.fromkeys(flat.parts, detail) | self.reduced
            if flat.is_reduced:
                flat.multiplies(None, here())
            flat.is_reduced = True
        else:
            return
        self.reducers = tuple(ranks)

    def takes_flats(self) -> None:
        """A step is made with what is in flat tensors.

        What these were multiplied by, the gradients were.
        """
        for flat in self.flats.facts():
            if flat.is_reduced and flat.factor is not None:
                self.multiplies(self.apart & flat.parts.keys(), *flat.factor)

    def multiplies(
        self, gradients: Iterable[int], number: float | None, place: Place
    ) -> None:
        """The program multiplies gradients, given by their addresses.

        By None: nobody knows by what.
        """
        for address in gradients:
            self.factors[address] = Factor(
                _product(self.factor_at(address), number), place
            )

    def factor_at(self, address: int) -> float | None:
        """By what number the program has multiplied a gradient, apart from clipping.

        It is None if nobody knows.
        """
        factor = self.factors.get(address)
        return 1.0 if factor is None else factor.number

    def multiplied(self, gradient: torch.Tensor | None) -> Factor | None:
        """By what a gradient was multiplied since the last `backward`, or None.

        It is None if it was not multiplied.
        """
        address = 0 if gradient is None else address_of(gradient)
        by_hand, clipped = self.factors.get(address), self.clipped.get(address)
        if by_hand is None or clipped is None:
            return by_hand or clipped
        return Factor(_product(by_hand.number, clipped.number), clipped.place)

    def companions(self) -> tuple[int, ...]:
        """The ranks with which this one trains one model.

        Its calls since the last step say so, as far as they go.
        """
        for model in self.models:
            if model.key in self.called:
                return model.ranks
        return self.reducers

    def forget(self) -> None:
        """A step is made: what was before it is over."""
        self.backwards = []
        self.called, self.synchronized, self.left_open = set(), set(), set()
        self.gradients, self.addresses = {}, set()
        self.factors, self.clipped = {}, {}
        self.flats.clear()
        self.reduced, self.reducers, self.apart = {}, (), set()
        self.was_awaited = True
        self.given, self.used = {}, {}


def _product(one: float | None, other: float | None) -> float | None:
    """The product of two factors, of which nobody may know one."""
    return None if one is None or other is None else one * other


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, in order."""
    return [
        parameter for group in optimizer.param_groups for parameter in members_of(group)
    ]


def members_of(group: Any) -> list[Any]:
    """The parameters of an optimizer's group, or their positions in a state.

    Some optimizers of the program's own have none.
    """
    members = entry_of(group, "params")
    return list(members) if isinstance(members, (list, tuple)) else []


def has_step_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer is that of torch.

    It reads learning rates as they are, and keeps no weights.
    """
    step = inspect.unwrap(type(optimizer).step)
    return str(step.__module__).startswith("torch.optim.")


def tensors_in(values: Iterable[Any], depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The tensors among what an operator gets or makes, also those in lists.

    A list may have itself.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and depth:
            yield from tensors_in(value, depth - 1)


def address_of(tensor: Any) -> int:
    """Where a tensor's numbers are; 0 of none, or of one with them elsewhere."""
    return tensor.data_ptr() if is_plain(tensor) else 0


def addresses_of(written: Any) -> list[int]:
    """Where the numbers of a tensor are, or of each of several.

    That is what an operator gets as its first argument.
    """
    return list(
        map(address_of, written if isinstance(written, (list, tuple)) else [written])
    )
