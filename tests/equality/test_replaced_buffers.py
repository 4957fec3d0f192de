"""A step that replaces a buffer: `self.mean = 0.9 * self.mean + 0.1 * new`.

It puts another tensor in the place of the buffer.

In plain PyTorch, whoever holds the tensor that was there before keeps it as it is.
Until replaced buffers were replaced in the user's module, too, their values were
written into the tensor that was there: so an alias of it changed, and a write on the
alias reached the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_in_turns, only_with_copies
from torchstrategy import ReplicaBufferWarning
from torchstrategy._base.context import using_device

X = torch.arange(16, dtype=torch.float64).reshape(8, 2) / 16


class Net(nn.Module):
    """A layer with a buffer; `write` is what its forward does to the buffer."""

    def __init__(
        self, write: Callable[[Any], None], others: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).double()
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(0.1)
        self.register_buffer("mean", torch.ones(2, dtype=torch.float64))
        self.inner = nn.Module()
        self.table: dict[str, Any] = {}
        others(self)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layer.weight.device)
        with torch.no_grad():
            self.write(self)
        scale = self.mean + sum(held.to(x.device) for held in self.table.values())
        return self.layer(x) * scale * getattr(self.inner, "mean", 1)


def anew(m: Any) -> None:
    m.mean = m.mean * 0.5


def in_registration(m: Any) -> None:
    m._buffers["mean"] = m._buffers["mean"] * 0.5


def in_place_and_anew(m: Any) -> None:
    m.mean.mul_(0.5)
    m.mean = m.mean + 1


def under_its_other_name(m: Any) -> None:
    m.inner.mean = m.inner.mean * 0.5


def after_it_was_kept(m: Any) -> None:
    m.table["before"] = m.mean
    m.mean = m.mean * 0.5


def sometimes(m: Any) -> None:
    if m.mean[0] > 0.75:
        m.mean = m.mean * 0.5
    else:
        m.mean.add_(0.5)


def nowhere_else(m: Any) -> None:
    pass


def two_names(m: Any) -> None:
    m.inner.register_buffer("mean", m.mean)


def in_a_table(m: Any) -> None:
    m.table["mean"] = m.mean


CASES = [
    *(
        (write, nowhere_else)
        for write in (
            anew,
            in_registration,
            in_place_and_anew,
            after_it_was_kept,
            sometimes,
        )
    ),
    *((write, two_names) for write in (anew, under_its_other_name, in_place_and_anew)),
    *((write, in_a_table) for write in (anew, in_place_and_anew)),
]


def trained(
    strategy: torchstrategy.Strategy | None,
    write: Callable[[Any], None],
    others: Callable[[Any], None],
) -> list[torch.Tensor]:
    """Results, aliases of the buffer, and the model, after steps.

    The user writes on an alias between them.
    """
    device = (
        torch.device("cpu")
        if strategy is None
        else strategy.extended.parameter_devices[0]
    )
    with nullcontext() if strategy is None else strategy.scope(), using_device(device):
        net = Net(write, others)

    def run(step: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if strategy is None:
            return step(X)
        batches = strategy.experimental_distribute_values_from_function(
            lambda context: X.tensor_split(context.num_replicas_in_sync)[
                context.replica_id_in_sync_group
            ]
        )
        return strategy.gather(strategy.run(step, args=(batches,)), axis=0)

    results: list[torch.Tensor] = []
    aliases = [net.mean]
    for index in range(5):
        results.append(run(lambda x: net(x).detach()))
        # What a step keeps stays in its replica, where the user cannot write on it.
        if index % 2 and write is not after_it_was_kept:
            aliases[-2].mul_(0.25)
        aliases.append(net.mean)
    return [
        tensor.detach().cpu().clone()
        for tensor in (*results, *aliases, *net.state_dict().values())
    ]


@pytest.mark.parametrize(("write", "others"), CASES, ids=lambda fn: fn.__name__)
def test_a_replaced_buffer_is_another_tensor_as_in_plain_torch(
    several: torchstrategy.Strategy,
    write: Callable[[Any], None],
    others: Callable[[Any], None],
) -> None:
    for one, other in zip(
        trained(several, write, others), trained(None, write, others), strict=True
    ):
        torch.testing.assert_close(one, other)


@only_with_copies
def test_copies_are_not_made_anew_for_a_buffer_that_each_step_replaces(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        net = Net(anew, nowhere_else)
    copies = set()

    def step() -> None:
        net(X)
        copies.add(id(net.layer.weight.grad_fn or net.layer._parameters))

    for _ in range(4):
        several.run(step)
    assert len(copies) == several.num_replicas_in_sync


def test_a_buffer_that_each_step_replaces_differently_is_warned_of_once(
    several: torchstrategy.Strategy,
) -> None:
    def from_its_rows(m: Any) -> None:
        replica = torchstrategy.get_replica_context().replica_id_in_sync_group
        m.mean = m.mean * (0.5 + replica)

    with several.scope():
        net = Net(from_its_rows, nowhere_else)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            several.run(lambda: net(X))
    assert [one.category for one in caught] == [ReplicaBufferWarning]


def test_a_buffer_that_replicas_make_from_their_rows_is_warned_of() -> None:
    """A buffer that begins as None became the mean of the first replica's rows.

    Nobody said so.
    """

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mean is None:
                self.mean = x.mean(0)
            return x - self.mean

    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    model = strategy.distribute_module(Centred())
    (batch,) = strategy.experimental_distribute_dataset([X])
    with pytest.warns(
        ReplicaBufferWarning,
        match=r"The buffer Centred\.mean has other numbers in each replica",
    ):
        strategy.run(lambda x: model(x), args=(batch,))


@only_with_copies
def test_a_buffer_that_is_to_learn_is_refused() -> None:
    """Replicas had copies of it that were no part of any graph of the user's.

    It had no gradient after the run.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(
                "scale", torch.ones(2, dtype=torch.float64, requires_grad=True)
            )

    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    model = strategy.distribute_module(Scaled())
    with pytest.raises(
        TypeError, match=r"Scaled\.scale is a tensor that requires grad"
    ):
        strategy.run(lambda: (model.scale * X).mean().backward())


@only_in_turns
def test_a_buffer_that_is_to_learn_gets_its_gradient(
    several: torchstrategy.Strategy,
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(
                "scale", torch.ones(2, dtype=torch.float64, requires_grad=True)
            )

    with several.scope():
        model = Scaled()
    twin = Scaled()
    (batch,) = several.experimental_distribute_dataset([X])
    several.run(lambda x: (model.scale * x).square().mean().backward(), args=(batch,))
    (twin.scale * X).square().mean().backward()
    torch.testing.assert_close(model.scale.grad, twin.scale.grad, check_device=False)


def the_same(m: Any) -> None:
    m.other = m.mean


def a_view(m: Any) -> None:
    m.other = m.mean[:1]


def a_parameter(m: Any) -> None:
    m.other = m.layer.bias.detach()


def a_view_of_a_parameter(m: Any) -> None:
    m.other = m.layer.weight.detach()[1:, 1]


def something_new_in_both(m: Any) -> None:
    m.mean = m.other = m.mean * 0.5


def a_view_of_something_new(m: Any) -> None:
    m.mean = m.mean * 0.5
    m.other = m.mean[1:]


def through_data(m: Any) -> None:
    m.other.data = m.mean.data[:1]


@pytest.mark.parametrize(
    "put",
    [
        the_same,
        a_view,
        a_parameter,
        a_view_of_a_parameter,
        something_new_in_both,
        a_view_of_something_new,
        through_data,
    ],
    ids=lambda fn: fn.__name__,
)
def test_a_step_that_puts_one_tensor_in_two_places_leaves_one(
    several: torchstrategy.Strategy, put: Callable[[Any], None]
) -> None:
    """The user's module had two tensors: a write on one did not show in the other."""

    def write(m: Any) -> None:
        if m.due:
            put(m)
        m.mean.add_(0.25)
        m.scale.fill_(2 * m.other.sum())

    def others(m: Any) -> None:
        m.due = False
        m.register_buffer("other", torch.ones(2, dtype=torch.float64))
        m.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def trained(strategy: torchstrategy.Strategy | None) -> list[torch.Tensor]:
        with nullcontext() if strategy is None else strategy.scope():
            net = Net(write, others)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        seen = []

        def step() -> None:
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()

        for index in range(4):
            net.due = index == 1
            step() if strategy is None else strategy.run(step)
            net.mean.mul_(3)
            seen += [
                value.detach().cpu().clone() for value in net.state_dict().values()
            ]
        return seen

    for one, other in zip(trained(several), trained(None), strict=True):
        torch.testing.assert_close(one, other)
