"""What the user's modules get in the place of the plain attributes that replicas wrote.

    the same value in all replicas           this value
    numbers, strings and the like            those of the first replica
    a tensor, in the place of one like it    the tensor of the first replica
    anything else                            a `PerReplica` of what the replicas have

Containers and objects that hold nothing but data are merged item by item. A tensor like
the one before, of its shape and dtype, is taken for a statistic of the batch, and any
other for an output or a hidden state, which has the rows of one replica.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

import numpy as np
import torch

from torchstrategy._base.distributed_values import ABSENT, PerReplica
from torchstrategy._base.memory import bits, memory_id
from torchstrategy._base.objects.attribute_contents import (
    is_plain_holder,
    named_items,
    write_items,
)
from torchstrategy._base.plain import PLAIN
from torchstrategy._base.types import Device
from torchstrategy._copies.references.deep_copies import (
    ClosureRebinder,
    are_same_function,
    is_function,
)

Items = dict[tuple[str, Any], Any]  # what `named_items` returns

Look = Callable[[str, object, Sequence[object]], None]
"""Compares kept numbers with those of other replicas: see `LostNumbers.look`."""


# Note [Two rules of merging attributes]
# After a run, a user's object has one value in the place of those that the replicas
# wrote. There are two rules, and one could not do for both:
# - That of modules (`ModuleMerger`). A module is called between runs, too, and its
#   forward computes with its attributes: a `PerReplica` in the place of a number would
#   stop it. So where numbers or statistics differ, the first replica's stay, and a
#   warning says what is lost. Items of containers are merged one by one.
# - That of trainers (`Trainer.put_together`), and of what hooks keep. There, an
#   attribute is what a step gives to the program: of `self.rows = len(inputs)` the
#   first replica's alone would be a wrong answer. So what is not equal in all replicas
#   becomes a `PerReplica`, and a replica that took no part goes on with what it had.
# Both leave alone what is the same in all replicas, and let an output be a `PerReplica`
# that is kept. Buffers have rules of their own (`ReplicatedModules._buffer_values`),
# and so have the states of metrics (`metrics`).


@final
@dataclass(eq=False)
class ModuleMerger:
    """Makes one value of those that the replicas have at the end of a run.

    See Note [Two rules of merging attributes].

    All methods take the values of the replicas that took part in the run, the first
    replica's first; `ABSENT` where a replica has none.

    Args:
        present: The replicas that took part in the run.
        num_replicas: How many replicas there are.
        users: Returns a dict with the user's objects, by the ids of the replicas'
            objects in their place.
        memory: Returns the storages of tensors of which the replicas and the user have
            one each, such as parameters, and of those with a history: other tensors
            over such memory are no constants.
        device: Where the user's parameters are, and the user's forward would have made
            tensors.
        look: Compares numbers.
        is_understudy: Whether what this process computes does not count.
        is_quiet: Whether numbers are not compared, as in objects of packages, which
            keep their own books.
    """

    present: Sequence[int]
    num_replicas: int
    users: Callable[[], dict[int, Any]]
    memory: Callable[[], set[int]]
    device: Device
    look: Look
    is_understudy: bool
    is_quiet: bool = False
    # By the ids of the values.
    _made: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    # By the ids of the storages.
    _copied: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def merge(self, path: str, values: Sequence[Any], before: Any) -> Any:
        """The value for the user's module; `ABSENT` if it is to have none.

        Args:
            path: What to call it in a message.
            values: The values of the replicas.
            before: The value in the user's module.

        Raises:
            RuntimeError: If the step made a tensor to be trained.
        """
        first = values[0]
        if all(value is ABSENT or isinstance(value, PLAIN) for value in values):
            self._compare(path, values)
            return first
        # What stands in several places of the replicas is one object in the user's
        # modules, too.
        key = tuple(map(id, values))
        if key not in self._made:
            self._made[key] = self._find_known(values) or self._make(
                key, path, values, before
            )
        return self._made[key][0]

    def _compare(self, path: str, values: Sequence[Any]) -> None:
        if not self.is_quiet:
            self.look(
                path, values[0], [value for value in values[1:] if value is not ABSENT]
            )

    def _find_known(self, values: Sequence[Any]) -> list[Any]:
        """A list of what the user has in the place of all the values.

        If all of them are one object, it is what the user has for that.
        """
        known = [self.users().get(id(value), value) for value in values]
        if not all(map(operator.is_, known, known[1:])):
            return []
        one = known[0]
        if id(values[0]) in self.users() or len(values) > 1:
            return [one]
        # A single replica may have made it in the step: then it is copied, as where
        # there are several.
        may_be_made = is_plain_holder(one) or is_function(one) or type(one) in _ARRAYS
        return [] if may_be_made else [one]

    def _make(
        self, key: tuple[int, ...], path: str, values: Sequence[Any], before: Any
    ) -> list[Any]:
        there = [value for value in values if value is not ABSENT]
        first = there[0]
        # Tuples of several lengths have no items in common to be merged.
        kinds = {
            (type(value), len(value) if isinstance(value, tuple) else 0)
            for value in there
        }
        is_merged_whole = len(kinds) > 1 or any(
            id(value) in self.users() for value in there
        )
        if is_merged_whole or not is_plain_holder(first):
            self._made[key] = [made] = [self._merge_objects(path, values, before)]
            if isinstance(made, torch.Tensor) and made is not first:
                self._give_attributes(path, made, values, before)
            return [made]
        if isinstance(first, frozenset):
            return [first]
        if isinstance(first, tuple):
            items = self.items(
                path, list(map(named_items, values)), named_items(before)
            ).values()
            return [
                type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
            ]
        made = copy.copy(first)
        self._made[key] = [made]  # it may hold itself
        write_items(
            made, self.items(path, list(map(named_items, values)), named_items(before))
        )
        return [made]

    def _give_attributes(
        self, path: str, made: torch.Tensor, values: Sequence[Any], before: Any
    ) -> None:
        """Gives the user's tensor the attributes that the step set on the replicas'."""
        if any(vars(value) for value in values if isinstance(value, torch.Tensor)):
            items = self.items(
                path, list(map(named_items, values)), named_items(before)
            )
            vars(made).update({name: value for (_, name), value in items.items()})

    def items(self, path: str, of_replicas: Sequence[Items], before: Items) -> Items:
        """The items and attributes for a container of the user's."""
        merged: Items = {}
        for place in dict.fromkeys(chain.from_iterable(of_replicas)):
            shown, key = place
            values = [items.get(place, ABSENT) for items in of_replicas]
            value = self.merge(
                path + shown.format(key), values, before.get(place, ABSENT)
            )
            if value is not ABSENT:
                merged[place] = value
        return merged

    def _merge_objects(self, path: str, values: Sequence[Any], before: Any) -> Any:
        first = values[0]
        if _is_statistic(first, before):
            self._compare(path, values)
            return _copy_constant(
                first, before if isinstance(before, torch.Tensor) else self.device
            )
        is_trained = (
            isinstance(first, torch.Tensor) and first.is_leaf and first.requires_grad
        )
        # To compare the numbers of an accelerator, the program has to wait for it. So
        # tensors that differed once, as outputs do in each run, are not compared again.
        is_compared = type(first) in _ARRAYS and (
            is_trained or type(before) is not PerReplica
        )
        if is_compared and not any(_differ(first, value) for value in values):
            if is_trained and len(values) > 1:
                raise RuntimeError(_TRAINABLE.format(path=path))
            # A tensor with a history is an output, and so is a view of a parameter.
            is_output = isinstance(first, torch.Tensor) and (
                first.requires_grad or memory_id(first) in self.memory()
            )
            if not is_output:
                return self._copy_constant(first)
        functions = list(map(ClosureRebinder(self.users()).rebind, values))
        if is_function(first) and all(
            are_same_function(functions[0], other) for other in functions
        ):
            return functions[0]
        if self.is_understudy:
            return PerReplica(
                [ABSENT] * self.num_replicas, understudy=first, is_kept=True
            )
        # Replicas that took no part have none of the rows.
        without_rows = (
            _make_without_rows(values) if len(values) < self.num_replicas else ABSENT
        )
        components = [without_rows] * self.num_replicas
        for r, value in zip(self.present, values, strict=True):
            components[r] = value
        return PerReplica(components, is_kept=True)

    def _copy_constant(self, value: Any) -> Any:
        """A copy for the user.

        Copies of tensors that share memory share memory, too.
        """
        if isinstance(value, np.ndarray) or value.layout is not torch.strided:
            return _copy_constant(value, self.device)
        key = memory_id(value), value.dtype
        if key not in self._copied:
            size = value.untyped_storage().nbytes() // value.element_size()
            self._copied[key] = _copy_constant(
                value.detach().as_strided((size,), (1,), 0), self.device
            )
        return self._copied[key].as_strided(
            value.shape, value.stride(), value.storage_offset()
        )


_ARRAYS = (torch.Tensor, np.ndarray)


def _copy_constant(value: Any, like: Any) -> Any:
    """A copy of a tensor or array without history, where `like` is.

    `like` may also be a device.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    device = like.device if isinstance(like, torch.Tensor) else like
    if value.is_cpu and not isinstance(like, torch.Tensor):
        # The step has made it there, and not where its replica is.
        device = value.device
    return value.detach().to(device, copy=True)


def _make_without_rows(values: Sequence[Any]) -> Any:
    """What a replica that took no part in the run has for an output: no rows of it."""
    first = next(
        (value for value in values if type(value) in _ARRAYS and value.ndim), None
    )
    if isinstance(first, torch.Tensor) and not first.is_nested:
        return torch.zeros(
            (0, *first.shape[1:]),
            dtype=first.dtype,
            device=first.device,
            layout=first.layout,
        )
    return first[:0] if isinstance(first, np.ndarray) else ABSENT


def _is_statistic(value: Any, before: Any) -> bool:
    """Whether a value is a tensor or array like a constant one before.

    It may also be a constant number in one, without rows.
    """
    if type(value) not in _ARRAYS:
        return False
    is_like = type(value) is type(before) and (value.shape, value.dtype) == (
        before.shape,
        before.dtype,
    )
    if is_like and not getattr(before, "requires_grad", False):
        return True
    return value.ndim == 0 and not getattr(value, "requires_grad", False)


def _differ(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or (one.shape, one.dtype) != (
        other.shape,
        other.dtype,
    ):
        return True
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() != other.tobytes())
    if (
        one.layout is not torch.strided
        or other.layout is not torch.strided
        or one.is_nested
        or one.is_meta
    ):
        return True  # `torch.equal` takes none of these
    # Bits are compared: a NaN is no other value than the same NaN.
    return not torch.equal(bits(one), bits(other.to(one.device)))


_TRAINABLE = (
    "The step made {path} in each replica, a tensor that requires grad: its gradients "
    "would not be added up, so each replica would train its own. Make it outside of "
    "strategy.run, as a torch.nn.Parameter of the module; or, if it is constant, "
    "without requires_grad."
)
