"""What replicas' copies of a model cost: making them, and keeping them in step.

Copies in step have the values of the originals.

python benchmarks/replication.py [--rounds N] [--json FILE]

A parameter on the device of its replica shares the memory of the original. What
"Mirrored" stands for here copies all parameters to every replica but the first all the
same, as MirroredStrategy does where each replica has a device of its own.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import replicate

import torchstrategy
from contest import Contender, Measure, Row, Work, compared, hold, timed
from torchstrategy import ReduceOp
from torchstrategy._copies.replicated_storage import ReplicatedStorage
from torchstrategy._run.placement import Placement
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.testing import count_traffic

BAR = 1.15


def small(modules: int) -> nn.Module:
    """Linear layers and activations in turns."""
    return nn.Sequential(
        *[m for _ in range(modules // 2) for m in (nn.Linear(64, 64), nn.ReLU())]
    )


def large() -> nn.Module:
    """A few matrices of 16 MB, which no cache holds."""
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "10 modules": lambda: small(10),
    "100 modules": lambda: small(100),
    "1,000 modules": lambda: small(1000),
    "24 matrices": large,
}


def nothing() -> None:
    """A step that leaves the models of its strategy alone."""


def put_into(strategy: torchstrategy.Strategy, model: str) -> nn.Module:
    """A model of the strategy's, with copies that are known to be the original's."""
    with strategy.scope():
        made = MODELS[model]()
    strategy.run(nothing)
    until_at_rest(strategy)
    return made


def first_run(rounds: int, replicas: int = 4) -> Iterator[Row]:
    """The run that makes the copies.

    `torch.nn.parallel.replicate` makes them at each forward.
    """
    for model in ("10 modules", "100 modules", "1,000 modules"):
        contenders = {
            "copy.deepcopy for each": Contender(
                fresh(model, lambda m: [copy.deepcopy(m) for _ in range(replicas)])
            ),
            "replicate, without the broadcast": Contender(
                fresh(model, lambda m: structure(m, replicas)), FIRST
            ),
            "Central, the first run": Contender(
                first(torchstrategy.CentralStorageStrategy, model, replicas), FIRST
            ),
            "Mirrored, the first run": Contender(
                first(mirrored, model, replicas), FIRST
            ),
        }
        yield from compared(f"{replicas} replicas, {model}", contenders, rounds)


FIRST = ("copy.deepcopy for each",)


def fresh(model: str, work: Callable[[nn.Module], object]) -> Measure:
    """What it takes to do something to a model that is new each time."""

    def measure() -> float:
        made = MODELS[model]()
        return once(lambda: work(made))

    return measure


def first(
    kind: Callable[..., torchstrategy.Strategy], model: str, replicas: int
) -> Measure:
    """The first run with a model in the scope of its strategy."""
    strategy = kind(["cpu"] * replicas)
    strategy.run(nothing)  # its threads are there

    def measure() -> float:
        with strategy.scope():
            made = MODELS[model]()
        seconds = once(lambda: strategy.run(nothing))
        del made
        return seconds

    return measure


def structure(model: nn.Module, replicas: int) -> list[nn.Module]:
    """What `replicate` does besides the broadcast.

    It knows CUDA devices only, and is told that these are some.
    """
    own = sys.modules[replicate.__module__]
    with (
        mock.patch.object(own, "_get_device_index", lambda device, optional: device),
        mock.patch.object(
            own,
            "_broadcast_coalesced_reshape",
            lambda tensors, devices, detach: [tensors] * replicas,
        ),
    ):
        return replicate(model, range(replicas))


def once(work: Work) -> float:
    """The seconds of one call. What earlier ones left is collected before."""
    gc.collect()
    return timed(work, 1, time.process_time)()


def unchanged(rounds: int, replicas: int = 2) -> Iterator[Row]:
    """A run when nobody wrote on the parameters since the last: nothing is copied."""
    for model in MODELS:
        central, mirrored, empty = strategies(replicas)
        models = [put_into(strategy, model) for strategy in (central, mirrored)]
        count = len(list(models[0].parameters()))
        for strategy in (central, mirrored):
            with count_traffic() as traffic:
                strategy.run(nothing)
            assert traffic.writes == traffic.copies == 0
        without = timed(
            lambda strategy=empty: strategy.run(nothing), 20, time.process_time
        )
        contenders = {"no model": Contender(without)}
        for name, strategy in (("Central", central), ("Mirrored", mirrored)):
            work = timed(
                lambda strategy=strategy: strategy.run(nothing), 20, time.process_time
            )
            contenders[f"{name}, unchanged"] = Contender(work, ("no model",))
            contenders[f"{name}, unchanged: more, for each parameter"] = Contender(
                each(work, without, count)
            )
        yield from compared(f"{replicas} replicas, {model}", contenders, rounds, "µs")


def strategies(replicas: int) -> list[torchstrategy.Strategy]:
    """One that shares parameters' memory, one that copies, one to have no model."""
    devices = ["cpu"] * replicas
    kinds = (
        torchstrategy.CentralStorageStrategy,
        mirrored,
        torchstrategy.CentralStorageStrategy,
    )
    return [kind(devices) for kind in kinds]


def mirrored(devices: Sequence[str]) -> torchstrategy.Strategy:
    """One that copies parameters to all replicas but the first.

    All of them are on one device.
    """
    compute = [torch.device(device) for device in devices]
    storage = ReplicatedStorage(
        Placement(compute, compute[0], may_alias=False, is_mirrored=True)
    )
    return torchstrategy.Strategy(ReplicatedExtended(storage, ReduceOp.MEAN))


def each(work: Measure, without: Measure, count: int) -> Measure:
    """How much more one takes than the other, for each of so many parameters."""
    return lambda: (work() - without()) / count


def changed(rounds: int, replicas: int = 2) -> Iterator[Row]:
    """A run when all parameters were written since the last one.

    It is compared with a plain copy of the same bytes.

    MirroredStrategy copies them, to all replicas but the first. Where a model is small,
    a run costs more than the copy whatever was written, so what it costs more than one
    without changes is shown beside.
    """
    for model in MODELS:
        central, mirrored, _ = strategies(replicas)
        models = [put_into(strategy, model) for strategy in (central, mirrored)]
        check_copied(mirrored, list(models[1].parameters()))
        originals = [torch.rand_like(parameter) for parameter in models[0].parameters()]
        copies = [
            [torch.empty_like(original) for original in originals]
            for _ in range(replicas - 1)
        ]
        contenders = {
            "the copy": Contender(
                after(rewriting(originals), lambda o=originals, c=copies: copy_to(c, o))
            )
        }
        for name, strategy, made in (
            ("Central", central, models[0]),
            ("Mirrored", mirrored, models[1]),
        ):
            work = after(
                rewriting(list(made.parameters())),
                lambda strategy=strategy: strategy.run(nothing),
            )
            still = after(
                resting(strategy, originals),
                lambda strategy=strategy: strategy.run(nothing),
            )
            contenders[f"{name}, changed"] = Contender(work, ("the copy",), BAR)
            contenders[f"{name}, changed: more than unchanged"] = Contender(
                each(work, still, 1), ("the copy",)
            )
        yield from compared(f"{replicas} replicas, {model}", contenders, rounds, "µs")


def copy_to(copies: list[list[torch.Tensor]], originals: list[torch.Tensor]) -> None:
    """By hand: all values to each replica that has memory of its own."""
    for targets in copies:
        torch._foreach_copy_(targets, originals)


def check_copied(
    strategy: torchstrategy.Strategy, parameters: Sequence[torch.Tensor]
) -> None:
    """Every changed parameter is copied once to each replica but the first.

    Soon no more is copied.

    In the first runs without a change large ones are copied again: whoever writes on
    the memory of a CPU can do so in ways that torch does not count, and a copy costs no
    more than looking for them.
    """
    rewriting(parameters)()
    for expected in (len(parameters) * (strategy.num_replicas_in_sync - 1), 0):
        with count_traffic() as traffic:
            strategy.run(nothing)
        assert traffic.writes == expected
        until_at_rest(strategy)


def resting(strategy: torchstrategy.Strategy, others: Sequence[torch.Tensor]) -> Work:
    """Other tensors are written, so that the caches are as empty as after a change."""
    rewrite = rewriting(others)

    def work() -> None:
        until_at_rest(strategy)
        rewrite()

    return work


def until_at_rest(strategy: torchstrategy.Strategy) -> None:
    """The runs after a change in which the library begins to look for writes.

    It looks for writes that torch does not count.
    """
    for _ in range(2):
        strategy.run(nothing)


def rewriting(parameters: Sequence[torch.Tensor]) -> Work:
    """Writes on all of them, and leaves their values."""

    def write() -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(parameters), 1.0)

    return write


def after(prepare: Work, work: Work, repeats: int = 5) -> Measure:
    """The seconds of a call, each after something that is not measured."""
    one = timed(work, 1, time.process_time)

    def measure() -> float:
        seconds = 0.0
        for _ in range(repeats):
            prepare()
            seconds += one()
        return seconds / repeats

    return measure


CONTESTS = (first_run, unchanged, changed)

if __name__ == "__main__":
    hold(CONTESTS, __doc__ or "")
