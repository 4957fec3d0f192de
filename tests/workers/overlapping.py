"""Steps in which workers send gradients during backward; what may intervene."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchstrategy
from torchstrategy._run.own.gradient_plans import GradientPlan
from torchstrategy._run.own.own_gradients import OwnGradients
from workers.exact_steps import large_from

STEPS = 6


class Net(nn.Module):
    """A layer in each of several packs, and one that is not used by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.sometimes = (
            nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


Body = Callable[[Net, torch.Tensor, int, int], None]


def once(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    net(x).square().mean().backward()


def cleared_and_again(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    net(3 * x).sum().backward()
    if index % 2:
        for parameter in net.parameters():
            parameter.grad = None
        once(net, x, worker, index)


def cleared_in_the_end(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    once(net, x, worker, index)
    if index > 1:
        for parameter in net.second.parameters():
            parameter.grad = None


def used_by_some(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    y = net(x)
    if (index + worker) % 2:
        y = y + net.sometimes(x)
    y.square().mean().backward()


def frozen_for_a_while(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    net.second.requires_grad_(index not in (2, 3))
    once(net, x, worker, index)


def part_by_part(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    for rows in x.chunk(2):
        (net(rows).square().mean() / 2).backward()


def with_a_graph(net: Net, x: torch.Tensor, worker: int, index: int) -> None:
    loss = net(x).square().mean()
    gradients = torch.autograd.grad(
        loss, list(net.first.parameters()), create_graph=True
    )
    (loss + sum(g.square().sum() for g in gradients)).backward()


BODIES = (
    once,
    cleared_and_again,
    cleared_in_the_end,
    used_by_some,
    frozen_for_a_while,
    part_by_part,
    with_a_graph,
)


def rows(index: int, count: int) -> torch.Tensor:
    return torch.randn(
        count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(index)
    )


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def of_workers(name: str, count: int, size: float) -> tuple[list[torch.Tensor], int]:
    """The weights after training with gradients that are sent early.

    They have so many bytes. It also returns how many were sent so.
    """
    body: Body = next(body for body in BODIES if body.__name__ == name)
    sent: list[int] = []
    send = OwnGradients._send_waiting

    def counting(self: OwnGradients, plan: GradientPlan) -> None:
        before = len(self._sums)
        send(self, plan)
        sent.append(len(self._sums) - before)

    OwnGradients._send_waiting = counting  # type: ignore[method-assign]
    try:
        with large_from(size):
            strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
            with strategy.scope():
                net = made()
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            worker = dist.get_rank()

            def step(x: torch.Tensor, index: int) -> None:
                optimizer.zero_grad()
                body(net, x, worker, index)
                optimizer.step()

            batches = [rows(index, count) for index in range(STEPS)]
            for index, batch in enumerate(
                strategy.experimental_distribute_dataset(batches)
            ):
                strategy.run(step, args=(batch, index))
    finally:
        OwnGradients._send_waiting = send  # type: ignore[method-assign]
    return [p.detach().clone() for p in net.parameters()], sum(sent)


def of_plain(name: str, count: int, parts: int) -> list[torch.Tensor]:
    """The same in one process: gradients of workers' parts, weighted by rows."""
    body: Body = next(body for body in BODIES if body.__name__ == name)
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for index in range(STEPS):
        optimizer.zero_grad()
        for worker, part in enumerate(rows(index, count).split(-(-count // parts))):
            copied = copy.deepcopy(net)
            body(copied, part, worker, index)
            for parameter, other in zip(
                net.parameters(), copied.parameters(), strict=True
            ):
                parameter.requires_grad_(other.requires_grad)
                if other.grad is not None:
                    weighted = other.grad * len(part) / count
                    parameter.grad = (
                        weighted
                        if parameter.grad is None
                        else parameter.grad + weighted
                    )
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def of_kept_gradients() -> bool:
    """Whether gradients that the user keeps stay as they are."""
    kept, before = [], []
    with large_from(1):
        strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        with strategy.scope():
            net = made()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            once(net, x, 0, 0)
            optimizer.step()

        for index in range(6):
            strategy.run(step, args=(rows(index, 4),))
            gradient = net.first.weight.grad
            assert gradient is not None
            kept.append(gradient[1:])  # a view keeps the memory, too
            before.append(gradient[1:].clone())
    return all(map(torch.equal, kept, before))


def of_failure(how: str) -> str:
    """What a worker is told if another one fails, or goes another way.

    Some gradients were sent before.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    with strategy.scope():
        net = made()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    is_culprit = dist.get_rank() == 1

    def fails(gradient: Any) -> None:
        raise ValueError("in backward")

    def step(is_due: bool) -> None:
        optimizer.zero_grad()
        x = torch.tanh(net.first(torch.ones(2, 3, dtype=torch.float64)))
        if is_due and is_culprit and how == "raises":
            # The gradients of `second` have been made and sent by then.
            x.register_hook(fails)
        net.second(x).square().mean().backward()
        if is_due and is_culprit and how == "goes another way":
            torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))
        if is_due and not is_culprit and how == "another waits":
            torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))
        optimizer.step()

    try:
        with large_from(1):
            for index in range(5):
                strategy.run(step, args=(index == 3,))
    except (ValueError, torchstrategy.WorkerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
