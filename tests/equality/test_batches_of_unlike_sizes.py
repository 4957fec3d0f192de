"""A labelled and a larger unlabelled batch in one step.

Semi-supervised training has them (FixMatch, mean teachers).

Such a run was refused twice, one refusal after the other: the first said to give
`examples`, and with them the second one came. Who gave the labelled rows as examples
lost the unlabelled rows of each replica that had no labelled ones. Now one message has
all that is to be written, and here it is followed to the word.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from problems import assert_close, gradients
from topologies import central, central_with_copies, compute_devices, mirrored
from torchstrategy import RunOptions

# What the message says.
WRITTEN = {"gradient_reduction": "sum", "run_empty_replicas": True}
MAKERS = {"central": central, "copies": central_with_copies, "mirrored": mirrored}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(labelled: int, unlabelled: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, weak = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64)
        for n in (labelled, unlabelled)
    )
    strong = weak + 0.3 * torch.randn(
        unlabelled, 4, generator=generator, dtype=torch.float64
    )
    return (x, torch.randint(3, (labelled,), generator=generator)), (weak, strong)


def losses_of(
    model: nn.Module, labelled: Any, unlabelled: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each labelled row's loss, and each unlabelled one's, where the model is sure."""
    (x, y), (weak, strong) = labelled, unlabelled
    outputs = model(torch.cat([x, weak, strong]))
    of_labelled, of_weak, of_strong = outputs.split([len(x), len(weak), len(weak)])
    sure, guess = of_weak.detach().softmax(1).max(1)
    consistency = F.cross_entropy(of_strong, guess, reduction="none") * (sure > 0.4)
    return F.cross_entropy(of_labelled, y, reduction="none"), consistency


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    "sizes", [[(5, 11), (4, 12)], [(2, 7), (3, 3)], [(1, 9), (3, 1)]], ids=str
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_the_message_says_is_plain_pytorch(
    make: Any, sizes: list[tuple[int, int]], replicas: int
) -> None:
    strategy = make(replicas)
    plain = net()
    model = strategy.distribute_module(copy.deepcopy(plain))
    optimizer = strategy.distribute_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)

    def step(labelled: Any, unlabelled: Any) -> torch.Tensor:
        optimizer.zero_grad()
        supervised, consistency = losses_of(model, labelled, unlabelled)
        average = torchstrategy.nn.compute_average_loss
        loss = average(supervised) + 2 * average(consistency)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [data(*size, seed=seed) for seed, size in enumerate(sizes)]
    labelled = strategy.experimental_distribute_dataset([one for one, _ in batches])
    unlabelled = strategy.experimental_distribute_dataset(
        [other for _, other in batches]
    )
    for given, batch in zip(
        zip(labelled, unlabelled, strict=True), batches, strict=True
    ):
        loss = strategy.run(step, args=given, options=RunOptions(**WRITTEN))
        other.zero_grad()
        supervised, consistency = losses_of(plain, *batch)
        expected = supervised.mean() + 2 * consistency.mean()
        expected.backward()
        other.step()
        total = strategy.reduce("sum", loss, axis=None)
        assert_close({"loss": total.cpu()}, {"loss": expected.detach()}, "loss", 1e-12)
        assert_close(gradients(model), gradients(plain), "gradient", 1e-11, 1e-13)
        assert_close(model.state_dict(), plain.state_dict(), "weight", 1e-11, 1e-13)


def given(strategy: torchstrategy.Strategy, *sizes: int) -> Any:
    return tuple(
        next(iter(strategy.experimental_distribute_dataset([torch.ones(size, 2)])))
        for size in sizes
    )


@pytest.mark.parametrize("sizes", [(3, 5), (1, 5), (5, 1)])
def test_one_message_has_all_that_is_to_be_written(sizes: tuple[int, int]) -> None:
    strategy = central(2)
    batches = given(strategy, *sizes)
    with pytest.raises(
        ValueError, match="split with different numbers of rows"
    ) as caught:
        strategy.run(lambda a, b: None, args=batches)
    message = str(caught.value)
    assert f"{batches[0].rows} and {batches[1].rows} by replica" in message
    assert "compute_average_loss(losses)" in message
    assert "RunOptions(gradient_reduction='sum', run_empty_replicas=True)" in message
    assert "RunOptions(examples=[...], run_empty_replicas=True)" in message
    result = strategy.run(
        lambda a, b: len(a) + len(b), args=batches, options=RunOptions(**WRITTEN)
    )
    assert sum(result.values) == sum(sizes)
    shares = RunOptions(examples=[2, 1], run_empty_replicas=True)
    assert sum(
        strategy.run(lambda a, b: len(a) + len(b), args=batches, options=shares).values
    ) == sum(sizes)


@pytest.mark.parametrize(
    "options", [{"gradient_reduction": "sum"}, {"examples": [1, 1]}]
)
def test_half_of_it_is_refused_with_the_same_words(options: Any) -> None:
    strategy = central(2)
    with pytest.raises(
        ValueError,
        match=(
            r"Replica 1 has rows of one and none of "
            r"another.*run_empty_replicas=True\)"
        ),
    ):
        strategy.run(
            lambda a, b: None, args=given(strategy, 1, 4), options=RunOptions(**options)
        )


def test_examples_that_drop_rows_of_an_argument_are_refused() -> None:
    """The labelled rows, given as examples, dropped the unlabelled rows of replica 1.

    Nobody was told.
    """
    strategy = central(2)
    options = RunOptions(examples=[1, 0], run_empty_replicas=True)
    with pytest.raises(
        ValueError,
        match=r"RunOptions\(examples=\(1, 0\)\) drops the gradient of replica 1",
    ):
        strategy.run(lambda a, b: None, args=given(strategy, 1, 4), options=options)


def test_three_arguments_are_all_named() -> None:
    strategy = central(2)
    with pytest.raises(
        ValueError, match=r"\(2, 1\) and \(1, 1\) and \(2, 2\) by replica"
    ):
        strategy.run(lambda a, b, c: None, args=given(strategy, 3, 2, 4))


def test_one_device_needs_nothing() -> None:
    strategy = torchstrategy.OneDeviceStrategy(compute_devices(1)[0])
    assert strategy.run(lambda a, b: len(a) + len(b), args=given(strategy, 3, 5)) == 8
