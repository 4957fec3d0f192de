"""Workers whose models hold tensors without memory of their own.

In processes, to read there ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torchstrategy
from torchstrategy.testing import run_ranks


class Net(nn.Module):
    """A layer that is trained, with a tensor beside it that is not.

    Args:
        held: The tensor.
        place: Whether it is a `parameter` or a `buffer`.
    """

    def __init__(self, held: torch.Tensor, place: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if place == "parameter":
            self.held = nn.Parameter(held, requires_grad=False)
        else:
            self.register_buffer("held", held)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


Between = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, rank: int) -> None:
    pass


def trained(
    rank: int,
    make: Callable[[], nn.Module],
    in_step: Between = nothing,
    at_end: Between = nothing,
    later: Between = nothing,
) -> nn.Module:
    """What a worker comes to in four steps.

    Args:
        rank: Its number.
        make: Makes the model.
        in_step: Called with the model and the rank, as a step begins.
        at_end: The same, before the update.
        later: The same, between the second run and the third.
    """
    strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
    torch.manual_seed(rank)
    with strategy.scope():
        model = make()
        trained = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        optimizer = torch.optim.SGD(trained, lr=0.1)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        in_step(model, rank)
        model(rows).square().mean().backward()
        at_end(model, rank)
        optimizer.step()

    for i, batch in enumerate(
        strategy.experimental_distribute_dataset([torch.ones(4, 3)] * 6)
    ):
        if i == 2:
            later(model, rank)
        strategy.run(step, args=(batch,))
    return model


def wrapping() -> torch.Tensor:
    """A tensor that wraps two others, which begin behind the start of their memory."""
    return TwoTensor(torch.randn(8, 3)[2:4], torch.randn(8, 3)[2:4])


def free(model: nn.Module, rank: int) -> None:
    model.held.untyped_storage().resize_(0)


def draw_in_one(model: nn.Module, rank: int) -> None:
    if rank:
        torch.randn(1)


PLACES = ["parameter", "buffer"]


@pytest.mark.parametrize("place", PLACES)
def test_what_wraps_others_begins_with_their_values_of_worker_0(place: str) -> None:
    one, other = run_ranks(trained, 2, args=(lambda: Net(wrapping(), place),))[0]
    assert torch.equal(one.held.a, other.held.a) and torch.equal(
        one.held.b, other.held.b
    )
    assert torch.equal(one.layer.weight, other.layer.weight)


def test_values_are_compared_of_what_wraps_others() -> None:
    """Another random state is one of the things for which all values are compared.

    It was an error of NumPy's.
    """
    run_ranks(
        partial(trained, make=lambda: Net(wrapping(), "parameter"), later=draw_in_one),
        2,
    )

    def write_in_one(model: nn.Module, rank: int) -> None:
        model.held.b.data += float(rank)

    with pytest.raises(
        RuntimeError, match=r"Net\.held has other numbers in worker 1 than in worker 0"
    ):
        run_ranks(
            partial(
                trained, make=lambda: Net(wrapping(), "parameter"), later=write_in_one
            ),
            2,
        )


def test_a_wrapped_parameter_is_trained() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(wrapping())
        return layer

    one, other = run_ranks(trained, 2, args=(make,))[0]
    assert torch.equal(one.weight.a, other.weight.a) and torch.equal(
        one.bias, other.bias
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_begins_without_memory_is_refused(place: str) -> None:
    def make() -> nn.Module:
        model = Net(torch.ones(2000)[1000:], place)
        free(model, 0)
        return model

    with pytest.raises(
        TypeError,
        match=(
            r"Net\.held has no memory: .* Give it memory and values before "
            r"strategy\.run"
        ),
    ):
        run_ranks(trained, 2, args=(make,))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2000, 1 << 18])
def test_memory_may_be_taken_away_between_runs(place: str, size: int) -> None:
    run_ranks(
        partial(trained, make=lambda: Net(torch.ones(size)[1000:], place), later=free),
        2,
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2000, 1 << 18])
def test_a_tensor_may_have_memory_only_while_a_step_uses_it(
    place: str, size: int
) -> None:
    def fill(model: nn.Module, rank: int) -> None:
        model.held.untyped_storage().resize_(4 * size)
        with torch.no_grad():
            model.held.fill_(3)

    def make() -> nn.Module:
        return Net(torch.ones(size)[1000:], place)

    one, other = run_ranks(partial(trained, make=make, in_step=fill, at_end=free), 2)[0]
    assert torch.equal(one.layer.weight, other.layer.weight)
    assert one.held.untyped_storage().nbytes() == 0


def test_a_write_of_the_step_on_what_wraps_others_is_refused() -> None:
    def write(model: nn.Module, rank: int) -> None:
        model.held += 1

    told = (
        r"Net\.held is a buffer of the class TwoTensor, which wraps other tensors, and "
        r"the step has written it"
    )
    with pytest.raises(RuntimeError, match=told):
        run_ranks(
            partial(trained, make=lambda: Net(wrapping(), "buffer"), in_step=write), 2
        )


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:torch.quantize_per_channel"
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2], ids=str)
def test_quantized_tensors_are_compared(place: str, dtype: torch.dtype) -> None:
    """It ended the process to send them."""

    def make(number: float) -> nn.Module:
        if dtype is torch.quint8:
            held = torch.quantize_per_tensor(torch.full((9,), number), 0.1, 0, dtype)
        else:
            held = torch.quantize_per_channel(
                torch.full((4, 4), number), torch.ones(4), torch.zeros(4), 0, dtype
            )
        return Net(held, place)

    run_ranks(trained, 2, args=(lambda: make(1.0),))
    with pytest.raises(RuntimeError, match=r"Net\.held has other numbers"):
        run_ranks(lambda rank: trained(rank, lambda: make(float(rank))), 2)


def test_a_sparse_parameter_is_refused() -> None:
    told = (
        r"Net\.held is a parameter of the layout torch\.sparse_coo.*register it as a "
        r"buffer"
    )
    with pytest.raises(TypeError, match=told):
        run_ranks(
            trained, 2, args=(lambda: Net(torch.eye(3).to_sparse(), "parameter"),)
        )
    run_ranks(trained, 2, args=(lambda: Net(torch.eye(3).to_sparse(), "buffer"),))


def channels_last() -> torch.Tensor:
    return torch.randn(8, 8, 3, 3).contiguous(memory_format=torch.channels_last)


def expanded() -> torch.Tensor:
    return torch.randn(1).expand(8, 8)


@pytest.mark.parametrize("make", [channels_last, expanded])
def test_writes_in_one_worker_are_found_in_every_layout(
    make: Callable[[], torch.Tensor],
) -> None:
    """The weights of convolutions with their channels last were never compared."""

    def write(model: nn.Module, rank: int) -> None:
        model.held.data[:1, :1] += float(rank)

    with pytest.raises(
        RuntimeError, match=r"Net\.held has other numbers in worker 1 than in worker 0"
    ):
        run_ranks(
            partial(trained, make=lambda: Net(make(), "parameter"), later=write), 2
        )
