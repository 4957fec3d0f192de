"""Checkpoints that a program loads, and what takes its values from them.

`replaced` tells of it.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import entry_of
from torchstrategy.testing._lints.evidence.facts import Facts, tensors_in
from torchstrategy.testing._lints.evidence.known import Known
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.lint import Lint

_MOST_VALUES, _DEEPEST, _DEEPEST_NUMBER = 100_000, 6, 2
# The state of a schedule counts its own calls.
_OF_SCHEDULES = {"_step_count", "num_bad_epochs"}


@final
@dataclass(eq=False)
class Checkpoint:
    """What `torch.load` has returned.

    Attributes:
        place: Where it was loaded.
        numbers: The whole numbers in it, such as `{"epoch": 3}`, besides those of
            optimizers and schedules.
        groups: The `param_groups` of the optimizers whose state it has.
        moments: What these optimizers know of each parameter, such as `exp_avg`.
    """

    place: Place
    numbers: dict[str, int] = field(default_factory=dict)
    groups: list[Any] = field(default_factory=list)
    moments: set[str] = field(default_factory=set)


@final
class Checkpoints(Lint):
    """Notes what was loaded.

    Other lints ask it which checkpoint a model or an optimizer has its values from.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, Known[Checkpoint]] = defaultdict(Known)
        self._groups: dict[int, list[Checkpoint]] = defaultdict(list)

    @override
    def unpickled(self, facts: Facts, value: Any) -> None:
        if isinstance(value, dict):
            checkpoint = Checkpoint(here())
            for tensor in _look_into(value, checkpoint):
                self._tensors[facts.rank].put(tensor, checkpoint)
            if checkpoint.groups:
                self._groups[facts.rank].append(checkpoint)

    def of_tensors(self, facts: Facts, values: Any) -> Checkpoint | None:
        """The checkpoint that most tensors among some values are from, or None."""
        tensors = list(tensors_in(list(values)))
        found = [self._tensors[facts.rank].get(tensor) for tensor in tensors]
        there = [checkpoint for checkpoint in found if checkpoint is not None]
        return there[0] if there and 2 * there.count(there[0]) > len(tensors) else None

    def of_optimizer(self, facts: Facts, state: Any) -> Checkpoint | None:
        """The checkpoint that an optimizer's state is from; None if there is none."""
        groups = entry_of(state, "param_groups")
        for checkpoint in self._groups[facts.rank]:
            if any(groups is its for its in checkpoint.groups):
                return checkpoint
        moments = entry_of(state, "state")
        several = dict.values(moments) if isinstance(moments, dict) else ()
        each = [dict.values(known) for known in several if isinstance(known, dict)]
        return self.of_tensors(facts, [one for values in each for one in values])


def _look_into(value: dict[Any, Any], checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
    """Notes what there is in a checkpoint, and gives its tensors."""
    # What is not deep has the names that count.
    waiting: deque[tuple[Any, Any, int]] = deque([(None, value, 0)])
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        name, one, depth = waiting.popleft()
        if isinstance(one, torch.Tensor):
            yield one
        elif (
            isinstance(one, int) and not isinstance(one, bool) and isinstance(name, str)
        ):
            checkpoint.numbers.setdefault(name, one)
        elif isinstance(one, dict) and _is_of_optimizer(one):
            checkpoint.groups.append(entry_of(one, "param_groups"))
            for known in dict.values(entry_of(one, "state")):
                for kind, moment in (
                    dict.items(known) if isinstance(known, dict) else ()
                ):
                    if is_moment(moment):
                        checkpoint.moments.add(kind)
                        yield moment
        elif (
            depth < _DEEPEST
            and isinstance(one, dict)
            and not _OF_SCHEDULES & dict.keys(one)
        ):
            waiting += [
                (key if depth < _DEEPEST_NUMBER else None, inner, depth + 1)
                for key, inner in dict.items(one)
            ]
        elif depth < _DEEPEST and isinstance(one, (list, tuple)):
            waiting += [(None, inner, _DEEPEST_NUMBER + 1) for inner in one]


def _is_of_optimizer(value: dict[Any, Any]) -> bool:
    return isinstance(entry_of(value, "param_groups"), list) and isinstance(
        entry_of(value, "state"), dict
    )


def is_moment(value: Any) -> bool:
    """Whether a value is what an optimizer knows of each number of a parameter.

    It is no counter then.
    """
    return isinstance(value, torch.Tensor) and value.dim() > 0


Tell = Callable[..., None]
"""Is told what has happened, with its objects."""


def replaced(tell: Tell) -> list[tuple[Any, str, Any]]:
    """What tells of checkpoints, in place of functions of torch."""
    module, optimizer = torch.nn.Module, torch.optim.Optimizer

    def loaded(value: Any, *_: Any, **__: Any) -> None:
        tell("unpickled", value)

    def gave(state: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if (
            not args
            and kwargs.get("destination") is None
            and not torch.compiler.is_compiling()
        ):  # the whole of it
            tell("gave_state", module, state)

    def restored(
        misfits: Any, module: Any, state_dict: Any, *_: Any, **__: Any
    ) -> None:
        if isinstance(state_dict, dict):
            tell("restored", module, state_dict, misfits)

    def gave_of_optimizer(state: Any, optimizer: Any) -> None:
        if not torch.compiler.is_compiling():
            tell("gave_optimizer_state", optimizer, state)

    def restored_optimizer(_: Any, optimizer: Any, state_dict: Any) -> None:
        if isinstance(state_dict, dict):
            tell("restored_optimizer", optimizer, state_dict)

    return [
        (torch, "load", _followed_by(torch.load, loaded)),
        (module, "state_dict", _followed_by(module.state_dict, gave)),
        (module, "load_state_dict", _followed_by(module.load_state_dict, restored)),
        (
            optimizer,
            "state_dict",
            _followed_by(optimizer.state_dict, gave_of_optimizer),
        ),
        (
            optimizer,
            "load_state_dict",
            _followed_by(optimizer.load_state_dict, restored_optimizer),
        ),
    ]


def _followed_by(
    function: Callable[..., Any], say: Callable[..., None]
) -> Callable[..., Any]:
    """A function, after which another is called with its result and arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        say(result, *args, **kwargs)
        return result

    return called
