"""The saved position of a loader, and what is wrong with it, if anything.

A position is wrong if it was changed, or belongs to another loader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

# The saved position of a loader: what its own `state_dict` returned, or a count and
# states of random generators.
State = dict[str, Any]


def check_form(state: Any) -> None:
    """Raises an error for a state without the form in which `Source.state` returns it.

    Raises:
        TypeError: Naming the entry.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"{state!r:.60} is not the state of a loader that "
            "DistributedDataset.state_dict() returns."
        )
    form = _FORM_OF_LOADER if "loader" in state else _FORM
    told = "In the state of a loader that DistributedDataset.state_dict() returns"
    if state.keys() != form.keys():
        raise TypeError(
            f"{told}, the entries are {[*form]}; in this one, they are {[*state]}."
        )
    for name, (is_right, what) in form.items():
        if not is_right(state[name]):
            raise TypeError(f"{told}, {name!r} is {what}; got {state[name]!r:.60}.")


def check_generators(
    name: str, states: Sequence[torch.Tensor], generators: Sequence[torch.Generator]
) -> None:
    """Raises an error unless there is one valid state for each of some generators.

    Raises:
        ValueError: Naming the entry.
    """
    if len(states) != len(generators):
        raise ValueError(
            f"The state, in {name!r}, is of a loader with {max(len(states) - 1, 0)} "
            f"random generators of its own, and this one has {len(generators) - 1}. "
            "Make the loader as it was made there."
        )
    for index, (state, generator) in enumerate(zip(states, generators, strict=True)):
        try:
            torch.Generator(generator.device).set_state(state.cpu())
        except RuntimeError as error:
            raise ValueError(
                f"{name}[{index}] in the state is not that of a random generator: "
                f"{error}"
            ) from None


def _is_count(value: Any) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value <= sys.maxsize
    )


def _are_states(states: Any) -> bool:
    return isinstance(states, list) and all(
        isinstance(state, torch.Tensor)
        and state.dtype == torch.uint8
        and state.dim() == 1
        for state in states
    )


_FORM_OF_LOADER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "is_begun": (lambda value: isinstance(value, bool), "True or False"),
    "loader": (lambda value: True, "what the loader said of itself"),
}
_FORM: dict[str, tuple[Callable[[Any], bool], str]] = {
    "is_begun": _FORM_OF_LOADER["is_begun"],
    "batches": (_is_count, "how many batches were consumed"),
    "batch_size": (
        lambda value: value is None or (_is_count(value) and value > 0),
        "a number of rows, or None",
    ),
    "began": (_are_states, "a list of the states of random generators"),
    "asked": (
        lambda value: value is None or _are_states(value),
        "a list of the states of random generators, or None",
    ),
}
