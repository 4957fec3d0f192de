"""A program: data, which prints as the Python that makes it."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

from . import actions, events, layers
from .actions import Action
from .events import Event
from .layers import Layer
from .optimizers import Optimizer
from .topologies import Topology

_LISTS = ("layers", "optimizers", "before", "step", "then", "after", "events")


@dataclass(frozen=True)
class Program:
    """Everything about a training.

    Args:
        topology: Where it runs in replicas; in plain PyTorch it runs on the CPU.
        layers: The model.
        optimizers: Each with its part of the parameters.
        before, step, then, after: What is done for each batch; `step` is what is run in
            replicas, and `then` in a second run.
        batches: The rows of each.
        events: What is done between steps: after how many steps, and what.
        width: Of every layer.
        reach: How the step comes to its model: by "closure", as a method of a "trainer"
            or of a "trainer with parts", by its "arguments".
        made_in_scope: Or outside, and then distributed.
        teacher: Whether there is a second model, which is not trained.
        scaler: Whether losses are scaled.
    """

    topology: Topology
    layers: tuple[Layer, ...]
    optimizers: tuple[Optimizer, ...]
    before: tuple[Action, ...] = ()
    step: tuple[Action, ...] = ()
    then: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    batches: tuple[int, ...] = (4,)
    events: tuple[tuple[int, Event], ...] = ()
    width: int = 2
    reach: str = "closure"
    made_in_scope: bool = True
    teacher: bool = False
    scaler: bool = False

    @property
    def size(self) -> int:
        """How much there is to read."""
        return sum(len(getattr(self, name)) for name in (*_LISTS, "batches"))

    def __str__(self) -> str:
        lines = [f"    topology={self.topology!r},"]
        for name in _LISTS:
            found = getattr(self, name)
            if found:
                lines += [
                    f"    {name}=(",
                    *(f"        {part!r}," for part in found),
                    "    ),",
                ]
        lines.append(
            f"    batches={self.batches!r}, width={self.width!r}, reach={self.reach!r},"
        )
        lines.append(
            f"    made_in_scope={self.made_in_scope}, teacher={self.teacher}, "
            f"scaler={self.scaler},"
        )
        return "\n".join(["Program(", *lines, ")"])


def parsed(text: str) -> Program:
    """The program that prints as `text`."""
    names: dict[str, Any] = {
        "Program": Program,
        "Topology": Topology,
        "Optimizer": Optimizer,
    }
    for module in (layers, actions, events):
        names.update(
            {name: value for name, value in vars(module).items() if is_dataclass(value)}
        )
    program = eval(text, names)
    assert isinstance(program, Program)
    return program
