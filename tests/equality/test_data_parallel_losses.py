"""`DataParallel`: a loss of the gathered outputs is that of the whole batch.

It is, whatever it is a mean over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conditions import for_changes
from known_losses import KNOWN, Net, rows_of
from problems import close
from topologies import SIMULATED, compute_devices
from torchstrategy import DataParallel

TOKENS, CLASSES, IGNORED = 6, 4, -100
# Tokens of each row that count: of three replicas, the last has one row, and no token.
VALID = (6, 6, 5, 6, 1, 1, 0)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def batch_of(valid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (len(valid), TOKENS), generator=generator)
    labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = IGNORED
    return x, labels


def weights(outputs: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, CLASSES + 1, dtype=outputs.dtype, device=outputs.device)


def each(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        outputs.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
    )


def over_tokens(
    outputs: torch.Tensor, labels: torch.Tensor, **more: Any
) -> torch.Tensor:
    return F.cross_entropy(
        outputs.transpose(1, 2), labels, ignore_index=IGNORED, **more
    )


def masked(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != IGNORED
    return (each(outputs, labels) * mask).sum() / mask.sum().clamp(min=1)


def pairs(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = outputs.flatten(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))


LOSSES: dict[str, Loss] = {
    "tokens": over_tokens,
    "class weights": lambda outputs, labels: over_tokens(
        outputs, labels, weight=weights(outputs)
    ),
    "two terms": lambda outputs, labels: over_tokens(
        outputs, labels, label_smoothing=0.1, weight=weights(outputs)
    ),
    "a mask": masked,
    "a selection": lambda outputs, labels: each(outputs, labels)[
        labels != IGNORED
    ].mean(),
    "tokens, and a mean over rows": lambda outputs, labels: (
        over_tokens(outputs, labels) + outputs.square().mean()
    ),
    "a mean over rows": lambda outputs, labels: outputs.square().mean(),
    "a sum": lambda outputs, labels: each(outputs, labels).sum(),
    "a root": lambda outputs, labels: masked(outputs, labels).sqrt(),
    "pairs of rows": pairs,
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def trained(
    model: nn.Module, loss: Loss, batch: Any, backwards: int = 1
) -> list[torch.Tensor]:
    """The loss and the gradients of a script.

    Nothing in it tells a DataParallel from the module.
    """
    where = next(model.parameters()).device
    inputs, labels = (tensor.to(where) for tensor in batch)
    found = loss(model(inputs), labels)
    for left in reversed(range(backwards)):
        found.backward(retain_graph=left > 0)
    return [
        found.detach().cpu(),
        *(p.grad.cpu() for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize(
    "valid", [VALID, VALID[:5], (4,)], ids=["7 rows", "5 rows", "1 row"]
)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_are_those_of_plain_pytorch(
    name: str, replicas: int, valid: Any
) -> None:
    devices = compute_devices(replicas)
    model = DataParallel(made().to(devices[0]), devices)
    batch = batch_of(valid)
    close(
        trained(model, LOSSES[name], batch),
        trained(made(), LOSSES[name], batch),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("name", ["tokens", "two terms", "a mask"])
def test_backwards_that_are_run_twice_add_up(name: str) -> None:
    devices = compute_devices(2)
    model = DataParallel(made().to(devices[0]), devices)
    batch = batch_of(VALID)
    close(
        trained(model, LOSSES[name], batch, 2),
        trained(made(), LOSSES[name], batch, 2),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("name", ["tokens", "class weights", "two terms"])
def test_losses_of_micro_batches_add_up(name: str) -> None:
    devices = compute_devices(2)
    ours, plain = DataParallel(made().to(devices[0]), devices), made()
    for model in (ours, plain):
        for part in (slice(0, 3), slice(3, 7)):
            x, labels = batch_of(VALID)
            found = trained(model, LOSSES[name], (x[part], labels[part]))
        assert len(found) == 5
    close(
        [p.grad.cpu() for p in ours.parameters()],
        [p.grad for p in plain.parameters()],
        rtol=1e-12,
        atol=1e-14,
    )


class Split(Net):
    """A network whose forward runs in replicas.

    Its parts may be called, too, as in `model.module.head`.
    """

    def __init__(self) -> None:
        super().__init__()
        inner = Net()
        self.body, self.head, self.other, self.scale = (
            inner.body,
            inner.head,
            inner.other,
            inner.scale,
        )
        self.__dict__["parallel"] = DataParallel(inner, ["cpu"] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.parallel(x)
        return outputs


# A compiled loss takes seconds, and one loss needs the rows of other replicas.
LEFT_OUT = {"compiled_loss", "compiled_model", "gathered_by_everybody"}


@for_changes
@pytest.mark.skipif(bool(SIMULATED), reason="these losses hold tensors of the CPU")
@pytest.mark.parametrize("count", [5, 2])
def test_known_losses(count: int) -> None:
    for name, known in KNOWN.items():
        if name in LEFT_OUT:
            continue
        found = []
        for net in (Split(), Net()):
            known.loss(net, rows_of(count)).backward()
            found.append(
                {
                    name: p.grad
                    for name, p in net.named_parameters()
                    if p.grad is not None
                }
            )
        torch.testing.assert_close(
            *found,
            rtol=1e-11,
            atol=1e-13,
            msg=lambda told, name=name: f"{name}: {told}",
        )
