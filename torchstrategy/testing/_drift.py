"""Do the replicas still have the same parameters and buffers?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.context import local_object
from torchstrategy._base.errors import plural
from torchstrategy._base.objects.proxies import parameters_of
from torchstrategy._group.group import group_here
from torchstrategy._group.replica_threads import runs_under_way
from torchstrategy.strategy import StrategyBase
from torchstrategy.testing._instruments import none_in_force
from torchstrategy.testing._refusals import refuse_in_replica

MOST_NAMED = 5

_Tensors = Mapping[str, torch.Tensor]


def assert_replicas_agree(
    strategy: StrategyBase, *things: nn.Module | Optimizer
) -> None:
    """Fails if the replicas' copies of some modules or optimizers have drifted apart.

    Every parameter and buffer of each replica, and every tensor in the state of an
    optimizer, is compared with that of replica 0, bit by bit; NaN agrees with NaN.
    Nothing that a program can see changes: no value, gradient or random number. A step
    that writes on memory behind torch's back (through NumPy, `.data` of a buffer, a
    kernel of its own) makes replicas drift. On several real devices nothing tells of it
    but a loss that is a little wrong.

    Call it between runs. It looks at the copies that the next run would use; when they
    have drifted, the next run has fresh ones.

    Args:
        strategy: The strategy whose replicas they are.
        things: Modules of this strategy, with all below them, and optimizers.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> torchstrategy.testing.assert_replicas_agree(strategy, model)

    Raises:
        AssertionError: If they differ: which tensors, in which replicas, and by how
            much.
        TypeError: If there are none, or one is neither a module nor an optimizer.
        ValueError: If a module, or a parameter of an optimizer, is not the strategy's.
        RuntimeError: If it is called in a replica or in a merge function, or in another
            strategy's scope.
    """
    _refuse_misuse(strategy, things)

    def look() -> None:
        group = group_here("assert_replicas_agree")
        assert group is not None
        # Not a merge_call, before which the strategy makes checks of its own and
        # settles gradients.
        group.replica.synchronize(
            "assert_replicas_agree",
            lambda brought: _compared(group.participants.present, brought),
            _taken(),
        )

    def _taken() -> dict[str, torch.Tensor]:
        return dict(tensors_of([local_object(thing) for thing in things]))

    with none_in_force():
        strategy.run(look)


def _refuse_misuse(
    strategy: StrategyBase, things: Sequence[nn.Module | Optimizer]
) -> None:
    refuse_in_replica("assert_replicas_agree")
    if runs_under_way():
        raise RuntimeError(
            "assert_replicas_agree was called in a merge function. The copies of the "
            "run that is under way are in use, and it would look at others. Call it "
            "after strategy.run."
        )
    if not isinstance(strategy, StrategyBase):
        raise TypeError(
            "assert_replicas_agree takes a torchstrategy.Strategy first; got "
            f"{strategy!r}."
        )
    if not things:
        raise TypeError(
            "assert_replicas_agree(strategy) looks at nothing: name the modules to "
            "look at."
        )
    for thing in things:
        if not isinstance(thing, (nn.Module, Optimizer)):
            raise TypeError(
                "assert_replicas_agree looks at modules and optimizers; got a "
                f"{type(thing).__name__}."
            )
        parts: list[Any] = [thing]
        if isinstance(thing, Optimizer):
            parts = list(parameters_of(thing))
        if not any(map(strategy.extended.variable_created_in_scope, parts)):
            raise ValueError(
                f"assert_replicas_agree: {type(thing).__name__} does not belong to "
                f"{strategy!r}, which has no copies of it. Create it in "
                "strategy.scope(), or give it to strategy.distribute_module(module)."
            )


def tensors_of(things: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """By the name that they have in each replica; an optimizer's, in what it is."""
    for position, thing in enumerate(things):
        kind = type(thing).__name__.removeprefix("Replica")
        prefix = kind if len(things) == 1 else f"{kind} {position}"
        if not isinstance(thing, nn.Module):
            yield from _state_of(thing, prefix)
            continue
        yield from thing.named_parameters(prefix)
        yield from thing.named_buffers(prefix)


def _state_of(optimizer: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    state = optimizer.state
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            for name, value in state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield (
                        f"{prefix}.state[param_groups[{i}]['params'][{j}]][{name!r}]",
                        value,
                    )


def _compared(present: Sequence[int], brought: Sequence[_Tensors]) -> list[None]:
    """Called at a synchronization point: raises if the replicas' tensors differ."""
    first, others = brought[0], dict(zip(present[1:], brought[1:], strict=True))
    names = dict.fromkeys(name for tensors in brought for name in tensors)
    drifts = {name: drift for name in names if (drift := _drifts(name, first, others))}
    if drifts:
        lines = [f"    {name}: {'; '.join(drift)}" for name, drift in drifts.items()]
        if len(lines) > MOST_NAMED:
            lines[MOST_NAMED:] = [f"    and {len(lines) - MOST_NAMED} more"]
        raise AssertionError(
            f"The replicas have drifted apart in {len(drifts)} of "
            f"{plural(len(names), 'tensor')}:\n"
            + "\n".join(lines)
            + (
                "\nSomething wrote on a replica's copy where torch does not see it, "
                "such as through NumPy or `.data`."
            )
        )
    return [None] * len(brought)


def _drifts(name: str, first: _Tensors, others: Mapping[int, _Tensors]) -> list[str]:
    found = {
        r: difference(first.get(name), tensors.get(name))
        for r, tensors in others.items()
    }
    return [
        f"replica {r} {difference}" for r, difference in found.items() if difference
    ]


class _Kind(NamedTuple):
    """What tensors must have in common before their numbers can be compared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def difference(
    first: torch.Tensor | None, other: torch.Tensor | None, whom: str = "replica 0"
) -> str:
    """How a tensor differs from the one that `whom` has; empty if it does not."""
    if first is None or other is None:
        if first is other:
            return ""
        return (
            f"has it and {whom} has not"
            if first is None
            else f"does not have it and {whom} does"
        )
    kinds = [_Kind(t.dtype, tuple(t.shape), t.device.type) for t in (first, other)]
    if kinds[0] != kinds[1]:
        pairs = zip(kinds[0], kinds[1], strict=True)
        return ", ".join(
            f"has {theirs} instead of {ours}"
            for ours, theirs in pairs
            if ours != theirs
        )
    with torch.no_grad():
        numbers, others = (_listed(tensor) for tensor in (first, other))
        differs = (_bits(numbers) != _bits(others)).any(1)
        if numbers.is_floating_point() or numbers.is_complex():
            differs &= ~(_wide(numbers).isnan() & _wide(others).isnan())
        if not differs.any():
            return ""
        most = float((_wide(numbers) - _wide(others))[differs].abs().max())
    return (
        f"differs by up to {most:.3g}, in {int(differs.sum())} of "
        f"{plural(len(differs), 'number')}"
    )


def _listed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().cpu().reshape(-1)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unsqueeze(1).contiguous().view(torch.uint8)


def _wide(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.complex128)
