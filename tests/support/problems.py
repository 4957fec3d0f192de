"""Small problems, trained by plain PyTorch and in replicas, and compared.

A step is written once, as `step(model, optimizer, batch)`: plain PyTorch calls it with
the whole batch, and a strategy runs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from torchstrategy._base.devices import memory_device

Step = Callable[[Any, Any, Any], Any]

# Where replicas have devices of their own, torch itself refuses what the library would.
ELSEWHERE = "Expected all tensors to be on the same device"


def shown(value: object) -> str:
    """What a value is called in the id of a test: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Smooth, so that no gradient is zero by chance."""
    return nn.Sequential(
        nn.Linear(3, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 2, dtype=dtype)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def data(
    rows: int, dtype: torch.dtype = torch.float64, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, of which no two rows are alike."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    x = (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        + torch.arange(rows).unsqueeze(1) * 0.1
    )
    y = torch.randn(rows, 2, generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), y.to(dtype)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def deal(strategy: torchstrategy.Strategy, batch: Any) -> Any:
    """One batch, dealt out."""
    return next(iter(strategy.experimental_distribute_dataset([batch])))


def in_pieces(strategy: torchstrategy.Strategy, whole: torch.Tensor) -> Any:
    """A piece of a tensor for each replica, where that replica is.

    It is not dealt: all pieces weigh the same.
    """
    count = strategy.num_replicas_in_sync
    return strategy.run(
        lambda: whole.chunk(count)[replica_id()].to(torch.get_default_device())
    )


def share_a_place(strategy: torchstrategy.Strategy) -> bool:
    """Whether its replicas are on one device, and so run one at a time and in order."""
    return (
        len({memory_device(device) for device in strategy.extended.worker_devices}) == 1
    )


def context() -> torchstrategy.ReplicaContext:
    """The replica that the step is in."""
    here = torchstrategy.get_replica_context()
    assert here is not None
    return here


def replica_id() -> int:
    """Which replica the step is in; 0 for plain PyTorch."""
    return context().replica_id_in_sync_group


def built(
    strategy: torchstrategy.Strategy,
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], Any] | None,
) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """A model and its optimizer, made in the scope, and equal ones of no strategy."""
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        ours = optimizer(model) if optimizer else None
    torch.manual_seed(0)
    twin = build()
    return (model, ours), (twin, optimizer(twin) if optimizer else None)


def where_it_is(model: nn.Module, batch: Any) -> Any:
    """A batch of tensors, on the device of a model."""
    return [tensor.to(next(model.parameters()).device) for tensor in batch]


def close(actual: Any, expected: Any, **options: Any) -> None:
    """`torch.testing.assert_close` of tensors that may be on different devices."""
    torch.testing.assert_close(actual, expected, check_device=False, **options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in model.named_parameters()
    }


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_close(
    actual: Any,
    expected: Any,
    case: str,
    relative: float | None = None,
    absolute: float | None = None,
) -> None:
    """Equal by norm, tensor by tensor.

    To 1e-12 in float64 and 2e-6 in float32, unless said otherwise.
    """
    assert actual.keys() == expected.keys(), case
    for name, wanted in expected.items():
        got = actual[name]
        if wanted is None or got is None:
            assert got is None and wanted is None, (
                f"{case}: {name} is {got} and should be {wanted}"
            )
            continue
        got, wanted = got.cpu().to_dense(), wanted.cpu().to_dense()
        double = wanted.dtype == torch.float64
        rtol = relative or (1e-12 if double else 2e-6)
        atol = absolute or (1e-15 if double else 1e-8)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (
            f"{case}: {name} is {got.shape} {got.dtype}"
        )
        error, size = (
            float((got.double() - wanted.double()).norm()),
            float(wanted.double().norm()),
        )
        assert error <= rtol * size + atol, (
            f"{case}: {name} is off by {error:.3g}, of {size:.3g}"
        )


def compare(
    make: Callable[[int], torchstrategy.Strategy],
    replicas: int,
    step: Step,
    *,
    build: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], Any] | None = sgd,
    batches: Sequence[Any] | None = None,
    rows: int = 7,
    steps: int = 3,
    before: Callable[[nn.Module, Any], None] | None = None,
    after: Callable[[nn.Module, Any], None] | None = None,
    options: torchstrategy.RunOptions | None = None,
    case: str = "",
    relative: float = 1e-10,
) -> tuple[nn.Module, nn.Module]:
    """Takes some steps both ways; gradients and parameters have to agree after each.

    `before` and `after` are what is done outside of the step; both are given the model
    and the optimizer.
    """
    strategy = make(replicas)
    (model, ours), (twin, plain) = built(strategy, build, optimizer)
    for k, batch in enumerate(batches or [data(rows, seed=k) for k in range(steps)]):
        case_k = f"{case or step.__name__}, {replicas} replicas, step {k}"
        for m, o in ((model, ours), (twin, plain)):
            if before:
                before(m, o)
            if m is twin:
                step(twin, plain, batch)
            else:
                strategy.run(
                    lambda b: _nothing(step(model, ours, b)),
                    args=(deal(strategy, batch),),
                    options=options,
                )
            if after:
                after(m, o)
        assert_close(
            gradients(model), gradients(twin), f"{case_k}, gradient", relative, relative
        )
        assert_close(
            parameters(model),
            parameters(twin),
            f"{case_k}, parameter",
            relative,
            relative,
        )
    return model, twin


def _nothing(result: Any) -> None:
    """Steps that are compared are compared by what they leave behind."""
