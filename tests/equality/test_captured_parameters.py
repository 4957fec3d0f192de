"""A step uses parameters from a list that was made outside of it.

It has not got them from its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import torchstrategy

Make = Callable[[int], torchstrategy.Strategy]
Parameters = Sequence[nn.Parameter]


def of_all(loss: torch.Tensor, parameters: Parameters) -> None:
    loss.backward(inputs=parameters)


def of_one(loss: torch.Tensor, parameters: Parameters) -> None:
    loss.backward(inputs=parameters[0])


def of_a_dict(loss: torch.Tensor, parameters: Parameters) -> None:
    torch.autograd.backward(loss, inputs=list(dict(enumerate(parameters)).values())[1:])


def asked_for(loss: torch.Tensor, parameters: Parameters) -> None:
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss, parameters), strict=True
    ):
        parameter.grad = gradient


def clipped(loss: torch.Tensor, parameters: Parameters) -> None:
    loss.backward()
    clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize(
    "differentiate", [of_all, of_one, of_a_dict, asked_for, clipped]
)
def test_gradients_of_captured_parameters_are_those_of_plain_torch(
    differentiate: Callable[[torch.Tensor, Parameters], None], make: Make
) -> None:
    """In copies, `backward(inputs=parameters)` reached nothing.

    There was no gradient, no update, and no error.
    """

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    state, batches = (
        build().state_dict(),
        [torch.randn(7, 3).double() for _ in range(3)],
    )

    def train(strategy: torchstrategy.Strategy) -> list[torch.Tensor]:
        with strategy.scope():
            model = build()
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        parameters = list(model.parameters())

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            differentiate(model(rows).square().mean(), parameters)
            optimizer.step()

        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=(batch,))
        return [parameter.detach().cpu() for parameter in parameters]

    found, expected = train(make(3)), train(torchstrategy.get_strategy())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
