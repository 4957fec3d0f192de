"""A step that uses a tensor which is in no module of the strategy.

It is on one device, and the replicas are on others.

torch said which two devices had met, and nobody could tell from it which tensor was
meant, or what to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from topologies import SIMULATED

pytestmark = pytest.mark.skipif(
    not SIMULATED,
    reason="needs simulated devices: run pytest with --simulate-devices=5",
)


class Held:
    """An object that is no module."""

    of_class: torch.Tensor

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


def made() -> tuple[torchstrategy.Strategy, nn.Module, Any]:
    strategy = torchstrategy.MirroredStrategy(SIMULATED[:2])
    with strategy.scope():
        model = nn.Linear(3, 2)
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(4, 3)])
    return strategy, model, batch


def steps(
    model: nn.Module, device: torch.device | str
) -> dict[str, tuple[str, Callable[[torch.Tensor], Any]]]:
    """By what is captured: what a message calls it, and the step."""
    w, table = nn.Parameter(torch.ones(2, device=device)), torch.ones(2, device=device)
    held, weights = Held(table), {"scale": table}
    Held.of_class = table.clone()
    head = nn.Linear(2, 2).to(device)

    def default(x: torch.Tensor, scale: torch.Tensor = table) -> torch.Tensor:
        result: torch.Tensor = model(x) * scale
        return result

    return {
        "parameter": ("w", lambda x: (model(x) * w).sum().backward()),
        "tensor": ("table", lambda x: model(x) * table),
        "attribute": ("held.scale", lambda x: model(x) * held.scale),
        "dict": ("weights['scale']", lambda x: model(x) * weights["scale"]),
        "class": ("held.of_class", lambda x: model(x) * held.of_class),
        "default": ("a default argument", default),
        "module": ("head.weight", lambda x: head(model(x))),
    }


@pytest.mark.parametrize("kind", steps(nn.Linear(1, 1), "cpu"))
@pytest.mark.parametrize("place", ["the first device", "cpu"])
def test_the_tensor_is_named_before_torch_speaks(kind: str, place: str) -> None:
    strategy, model, batch = made()
    device = "cpu" if place == "cpu" else SIMULATED[0]
    name, step = steps(model, device)[kind]
    with pytest.raises(RuntimeError) as caught:
        strategy.run(step, args=(batch,))
    message = str(caught.value).partition("\nraised by")[0]
    assert message.startswith(
        "The step uses a tensor that is in no module of the strategy"
    )
    assert f"`{name}`, of shape" in message and f"on {torch.device(device)}" in message
    assert f"The replicas are on {SIMULATED[0]}, {SIMULATED[1]}" in message
    assert message.index("strategy.distribute_module(module)") < message.index(
        "on the same device"
    )
    assert any("raised by replica" in note for note in caught.value.__notes__)


def test_what_the_message_says_works() -> None:
    strategy, _, batch = made()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) * self.scale
            return result

    with strategy.scope():
        model = Net()
    strategy.run(lambda x: model(x).sum().backward(), args=(batch,))
    assert model.scale.grad is not None
    table = torch.ones(2)
    strategy.run(
        lambda x: (model(x) * table.to(x.device)).sum().backward(), args=(batch,)
    )


def test_an_error_about_tensors_of_the_step_stays_as_torch_has_it() -> None:
    strategy, model, batch = made()
    number = torch.tensor(2.0)  # torch takes it beside tensors of any device
    with pytest.raises(
        RuntimeError, match=r"^Expected all tensors to be on the same device"
    ):
        strategy.run(
            lambda x: model(x) * number + torch.ones(2, device="cpu"), args=(batch,)
        )


def test_other_errors_stay_as_they_are() -> None:
    strategy, model, batch = made()
    table = torch.ones(2)
    error = RuntimeError("something else")

    def step(x: torch.Tensor) -> None:
        model(x), table
        raise error

    with pytest.raises(RuntimeError, match=r"^something else") as caught:
        strategy.run(step, args=(batch,))
    assert caught.value is error


def test_a_moving_average_in_a_closure_is_told_where_to_be_updated() -> None:
    """Who followed the message made its average a buffer.

    Each replica then had one of its own rows.
    """
    strategy, model, batch = made()
    average = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }

    def update() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.5)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        update()

    with pytest.raises(
        RuntimeError,
        match=(
            r"update it after strategy.run, from your own "
            r"model, or in the step by get_"
        ),
    ):
        strategy.run(step, args=(batch,))
    before = average["weight"].clone()
    strategy.run(lambda x: model(x).sum().backward(), args=(batch,))
    with torch.no_grad():
        model.weight += 1
    update()  # what the message says
    torch.testing.assert_close(average["weight"], before + 0.5)
    strategy.run(
        lambda x: torchstrategy.get_replica_context().merge_call(
            lambda strategy: update()
        ),
        args=(batch,),
    )
    torch.testing.assert_close(average["weight"], before + 0.75)
