"""A training that fails where a test says, and what it must leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchstrategy

HANG = 15.0  # seconds: a run of these tests takes milliseconds


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ctx.error


def nothing(moment: str) -> None:
    pass


class Net(nn.Module):
    """Parameters, running statistics, an integer buffer, and random numbers.

    There is an attribute that its forward writes, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.25)
        self.last = nn.Linear(5, 2)
        self.calls = 0

    def forward(
        self, inputs: torch.Tensor, at: Callable[[str], None] = nothing
    ) -> torch.Tensor:
        self.calls += 1
        hidden = self.dropout(self.norm(self.first(inputs)))
        at("in forward")
        return self.last(hidden)


def replica() -> int:
    return torchstrategy.get_replica_context().replica_id_in_sync_group


class Problem:
    """A model and its optimizer in mid-training, with gradients that wait for more."""

    def __init__(self, strategy: torchstrategy.Strategy) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), lr=0.1, momentum=0.9
            )
        self.inputs = self.new_inputs()
        self.train()
        self.accumulate()

    def new_inputs(self) -> Any:
        return self.strategy.run(lambda: torch.randn(4, 3))

    def train(self) -> None:
        def step(inputs: torch.Tensor) -> None:
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()

        self.run(step)

    def accumulate(self) -> None:
        self.run(lambda inputs: self.model(inputs).square().mean().backward())

    def run(self, step: Callable[[torch.Tensor], Any]) -> Any:
        return self.strategy.run(step, args=(self.inputs,))

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds, the gradients, and what a forward may write."""
        state: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.detach().clone()
            state[f"{name}.grad"] = (
                None if parameter.grad is None else parameter.grad.clone()
            )
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}.{key}"] = (
                    value.clone() if isinstance(value, torch.Tensor) else value
                )
        for name, buffer in self.model.named_buffers():
            state[name] = buffer.clone()
        for i, group in enumerate(self.optimizer.param_groups):
            state[f"group {i}"] = {
                key: value for key, value in group.items() if key != "params"
            }
        for name, module in self.model.named_modules():
            plain = {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float))
            }
            state[f"attributes of {name}"] = plain
            state[f"class of {name}"] = type(module)
        state["class of the optimizer"] = type(self.optimizer)
        return state


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(state[name], torch.Tensor), f"{name} is {state[name]!r}"
            assert torch.equal(state[name], value), (
                f"{name} is {state[name]} and was {value}"
            )
        else:
            assert state[name] == value, name


class Steps:
    """A step that fails in one replica at one moment, and a record of who is in it."""

    def __init__(
        self,
        problem: Problem,
        moment: str,
        who: int,
        error: BaseException,
        clears: bool = True,
    ) -> None:
        self.problem, self.moment, self.who, self.error, self.clears = (
            problem,
            moment,
            who,
            error,
            clears,
        )
        self.entered: list[int] = []
        self.left: list[int] = []

    def __call__(self, inputs: torch.Tensor) -> None:
        self.entered.append(replica())
        try:
            self.step(inputs)
        finally:
            self.left.append(replica())

    def at(self, moment: str) -> None:
        if moment == self.moment and replica() == self.who:
            raise self.error

    def step(self, inputs: torch.Tensor) -> None:
        model, optimizer = self.problem.model, self.problem.optimizer
        context = torchstrategy.get_replica_context()
        self.at("at the beginning")
        optimizer.param_groups[0]["lr"] = 0.5
        model.norm.momentum = 0.75
        context.all_reduce("sum", torch.ones(()))
        self.at("after a meeting")
        if self.clears:
            optimizer.zero_grad()
            self.at("after clearing")
        outputs = model(inputs, self.at)
        if self.moment == "in backward" and replica() == self.who:
            outputs = RaisesInBackward.apply(outputs, self.error)
        outputs.square().mean().backward()
        self.at("after backward")
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.at("after clipping")
        context.merge_call(lambda strategy: None)
        self.at("after a merge call")
        context.merge_call(self.merge)

    def forget(self) -> None:
        """Takes apart error -> traceback -> outputs -> their graph -> error.

        No collector can see through that.
        """
        self.error.__traceback__ = None

    def merge(self, strategy: torchstrategy.Strategy) -> None:
        if self.moment == "in a merge function":
            raise self.error


MOMENTS = [
    "at the beginning",
    "after a meeting",
    "after clearing",
    "in forward",
    "in backward",
    "after backward",
    "after clipping",
    "after a merge call",
    "in a merge function",
]


def reduce(problem: Problem | None = None) -> None:
    torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))


def merge(problem: Problem | None = None) -> None:
    torchstrategy.get_replica_context().merge_call(lambda strategy: None)
