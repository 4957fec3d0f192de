"""Do the workers still have the same parameters, buffers and optimizer states?"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.errors import plural
from torchstrategy._base.torch_internals import is_distributed_tensor
from torchstrategy.strategy import StrategyBase
from torchstrategy.testing._drift import MOST_NAMED, difference, tensors_of
from torchstrategy.testing._refusals import refuse_in_replica


def assert_workers_agree(
    strategy: StrategyBase, *things: nn.Module | Optimizer
) -> None:
    """Fails if the workers' modules or optimizers have drifted apart.

    Every worker calls it, between runs. Every parameter, every buffer and every tensor
    in the state of an optimizer is compared with that of worker 0, bit by bit; NaN
    agrees with NaN. Of a tensor that is sharded, each worker puts the whole together
    and compares that. After a run all workers are equal.
    A worker drifts if the script writes on its model outside of `strategy.run` and not
    on those of others, for example if only one worker loads a checkpoint. A strategy in
    one process has one worker, which agrees with itself.

    Args:
        strategy: The strategy of the workers.
        things: Modules, with all below them, and optimizers.

    Example:
        >>> strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> torchstrategy.testing.assert_workers_agree(strategy, model)

    Raises:
        AssertionError: In every worker, if they differ: which tensors, in which
            workers, and by how much.
        TypeError: If there are none, or one is neither a module nor an optimizer.
        WorkerError: If another worker is at another place.
        RuntimeError: If it is called in a replica.
    """
    refuse_in_replica("assert_workers_agree")
    if not isinstance(strategy, StrategyBase):
        raise TypeError(
            "assert_workers_agree takes a torchstrategy.Strategy first; got "
            f"{strategy!r}."
        )
    workers, point = strategy.extended._workers, "assert_workers_agree"
    with workers.exchanging(point):
        if not things:
            raise TypeError(
                "assert_workers_agree(strategy) looks at nothing: name the modules to "
                "look at."
            )
        for thing in things:
            if not isinstance(thing, (nn.Module, Optimizer)):
                raise TypeError(
                    "assert_workers_agree looks at modules and optimizers; got a "
                    f"{type(thing).__name__}."
                )
    if workers.count == 1:
        return
    own = {name: tensor.detach() for name, tensor in tensors_of(things)}
    # Only tensors that differ are sent as a whole.
    marks = workers.all_gather_object(
        {name: _mark(tensor) for name, tensor in own.items()}, point
    )
    names = dict.fromkeys(name for known in marks for name in known)
    unlike = [
        name
        for name in names
        if any(known.get(name) != marks[0].get(name) for known in marks)
    ]
    if not unlike:
        return
    shown = unlike[:MOST_NAMED]
    of_all = workers.all_gather_object(
        {name: _whole(own[name]).cpu() for name in shown if name in own}, point
    )
    lines = []
    for name in shown:
        first = of_all[0].get(name)
        drifts = {
            w: difference(first, known.get(name), "worker 0")
            for w, known in enumerate(of_all)
        }
        words = [f"worker {w} {drift}" for w, drift in drifts.items() if drift]
        lines.append(f"    {name}: {'; '.join(words)}")
    if len(unlike) > len(shown):
        lines.append(f"    and {len(unlike) - len(shown)} more")
    raise AssertionError(
        f"The workers have drifted apart in {len(unlike)} of "
        f"{plural(len(names), 'tensor')}:\n"
        + "\n".join(lines)
        + (
            "\nSomething was written in some workers and not in others, outside of "
            "strategy.run: a checkpoint that only one of them has loaded, for example. "
            "Let all workers write the same."
        )
    )


def _whole(tensor: Any) -> torch.Tensor:
    """A tensor; of one that is sharded, what the parts of all workers are together."""
    whole: torch.Tensor = (
        tensor.full_tensor() if is_distributed_tensor(tensor) else tensor
    )
    return whole


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    """What differs where two tensors do. All NaN are alike."""
    numbers = _whole(tensor).to_dense().cpu().reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.where(~numbers.isnan(), torch.nan)
    return (
        tuple(tensor.shape),
        str(tensor.dtype),
        zlib.crc32(numbers.contiguous().view(torch.uint8).numpy().tobytes()),
    )
