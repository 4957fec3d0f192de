"""What torch does with a variable, and what a strategy does with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import torchstrategy
from problems import close, context, replica_id
from topologies import SIMULATED, central
from torchstrategy import Variable
from torchstrategy._base.devices import memory_device
from variables import (
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    components,
    has_components,
    made,
    make,
    numbers,
    silently,
)

# What torch does with it


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    """A class of tensors that has a say in what torch does."""


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "arithmetic": lambda v: 1 - v * 2 + v / v - v**2,
    "comparison": lambda v: (v > 1) | (v == 1),
    "stack": lambda v: torch.stack([v, v + 1]),
    "keyword": lambda v: torch.add(input=v, other=v, alpha=2),
    "einsum": lambda v: torch.einsum("i,i->", v, v),
    "linear": lambda v: F.linear(torch.eye(2, device=v.device), torch.stack([v, v]), v),
    "index": lambda v: v[1] + v[-1:],
    "unpacked": lambda v: sum(v),
    "where": lambda v: torch.where(v > 1, v, torch.zeros_like(v)),
    "out": lambda v: (
        torch.mul(v, v, out=torch.empty_like(v.detach()))
        if not v.requires_grad
        else v * v
    ),
    "loss": lambda v: F.mse_loss(v, v.detach() * 0),
    "to": lambda v: v.to(torch.float64),
    "data": lambda v: v.data + 1,
}


@pytest.mark.parametrize("use", USES)
def test_torch_takes_a_variable_as_the_tensor_that_it_is(use: str) -> None:
    for strategy in (make("one_device"), make("central_2"), make("mirrored_2")):
        for kwargs in ({}, {"synchronization": ON_READ, "aggregation": FIRST}):
            v = made(strategy, [1.0, 2.0], **kwargs)  # type: ignore[arg-type]
            expected = USES[use](torch.tensor([1.0, 2.0]))
            close(USES[use](v).detach(), expected)
            assert type(USES[use](v)) is torch.Tensor
            for result in strategy.experimental_local_results(
                strategy.run(lambda v=v: USES[use](v))
            ):
                close(result.detach(), expected)


def test_a_number_is_printed_as_one(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 3.0)
    w = made(strategy, v, trainable=False)
    assert w is not v and (f"{w:.1f}", float(w), int(w), bool(w)) == (
        "3.0",
        3.0,
        3,
        True,
    )
    printed = strategy.run(lambda: f"{w:.2f}")
    assert set(strategy.experimental_local_results(printed)) == {"3.00"}
    assert (
        made(strategy, 0, dtype=torch.float64).trainable
        and not made(strategy, 0).trainable
    )


def test_runs_at_the_same_time_lose_no_assignment(
    several: torchstrategy.Strategy,
) -> None:
    shared = made(several, 0.0, aggregation=SUM)

    def work() -> None:
        for _ in range(5):
            several.run(silently(lambda: shared.assign_add(torch.tensor(1.0))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.item() == 15.0 * several.num_replicas_in_sync


def test_writing_in_place_outside_is_assigning(
    strategy: torchstrategy.Strategy,
) -> None:
    v = made(strategy, [1.0, 1.0], trainable=False)
    w = made(strategy, [1.0, 1.0], synchronization=ON_READ, aggregation=MEAN)
    for variable in (v, w):
        before = variable
        variable.add_(1)
        variable += 1
        variable[0] = 9
        variable.clamp_(max=5)
        assert variable is before
        assert (
            numbers(strategy, lambda u=variable: u * 1)
            == [[5.0, 3.0]] * strategy.num_replicas_in_sync
        )
        nn.init.ones_(variable)
        assert variable.tolist() == [1.0, 1.0]


def test_writing_in_place_in_a_replica_is_refused(
    several: torchstrategy.Strategy,
) -> None:
    v = made(several, 1.0, trainable=False, name="counter")
    with pytest.raises(RuntimeError, match="counter was written in place in a replica"):
        several.run(silently(lambda: v.add_(1)))


def test_a_replica_may_write_in_place_on_a_value_of_its_own(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v = made(two_mirrored, 1.0, synchronization=ON_READ, aggregation=SUM)
    two_mirrored.run(silently(lambda: v.add_(replica_id())))
    assert components(two_mirrored, v) == [1.0, 2.0]


def test_what_is_known_of_a_value_that_cannot_be_read(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v = made(two_mirrored, [1.0, 2.0], synchronization=ON_READ)
    assert (v.shape, v.dtype, v.trainable) == (torch.Size([2]), torch.float32, False)
    assert "SyncOnReadVariable:{" in repr(v)
    with pytest.raises(
        ValueError, match="has a value in each replica and no aggregation"
    ):
        _ = v + 1
    v.assign([3.0, 4.0])
    assert numbers(two_mirrored, lambda: v * 1) == [[3.0, 4.0]] * 2


def test_modes_and_other_classes_of_tensors_have_their_say(
    two: torchstrategy.Strategy,
) -> None:
    v = made(two, [1.0, 2.0])
    tagged = torch.ones(2, device=v.device).as_subclass(Tagged)
    assert type(v * tagged) is type(tagged * v) is Tagged
    own = made(two, [1.0, 2.0], synchronization=ON_READ, aggregation=MEAN)
    own.add_(tagged)
    assert own.tolist() == [2.0, 3.0]
    with Recorder() as recorder:
        _ = v * 2
    assert "mul" in recorder.seen


def test_a_compiler_takes_no_replica_for_another(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v, own = (
        made(two_mirrored, 3.0),
        made(two_mirrored, 0.0, synchronization=ON_READ, aggregation=SUM),
    )
    compiled = torch.compile(lambda x: x * v + own, backend="eager")

    def step() -> torch.Tensor:
        own.assign(torch.tensor(float(replica_id())))
        return compiled(torch.ones(()))

    assert numbers(two_mirrored, step) == [3.0, 4.0]
    v.assign(5.0)
    assert numbers(two_mirrored, step) == [5.0, 6.0]


# What a strategy does with it


def test_a_mirrored_variable_is_a_value_of_several_replicas(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v = made(two_mirrored, [1.0, 3.0])
    w = made(two_mirrored, [1.0], synchronization=ON_READ, aggregation=MEAN)
    assert isinstance(v, torchstrategy.DistributedValues) and isinstance(
        w, torchstrategy.DistributedValues
    )
    assert repr(
        v
    ) == "MirroredVariable:{\n  0: tensor([1., 3.]),\n  1: tensor([1., 3.])\n}".replace(
        ".])", f".]{_device(0)})", 1
    ).replace(".])\n}", f".]{_device(1)})\n}}")
    close(two_mirrored.reduce("mean", v, axis=None).detach(), torch.tensor([1.0, 3.0]))
    close(two_mirrored.reduce("sum", w, axis=None), torch.tensor([2.0]))
    close(two_mirrored.gather(w, axis=0), torch.tensor([1.0, 1.0]))
    for r, own in enumerate(
        two_mirrored.experimental_local_results({"v": v, "other": 1})
    ):
        assert own["v"] is v.values[r] and own["other"] == 1
    reduced = two_mirrored.extended.reduce_to(
        "sum", two_mirrored.run(lambda: torch.ones(2) * 1), v
    )
    assert [part.device for part in reduced.values] == [
        part.device for part in v.values
    ]


def _device(replica: int) -> str:
    return f", device='{SIMULATED[replica]}'" if SIMULATED else ""


def test_a_collective_is_given_the_replicas_own_value(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    own = made(two_mirrored, [1.0], synchronization=ON_READ)
    shared = made(two_mirrored, [2.0], aggregation=MEAN)

    def step() -> Any:
        own.assign(torch.tensor([replica_id() + 1.0]))
        shared.assign(own)
        gathered = context().all_gather(own, axis=0)
        return gathered, context().all_reduce("sum", {"own": own, "shared": shared})

    for gathered, reduced in two_mirrored.experimental_local_results(
        two_mirrored.run(step)
    ):
        assert gathered.tolist() == [1.0, 2.0]
        assert (reduced["own"].item(), reduced["shared"].item()) == (3.0, 3.0)


def test_a_variable_in_the_place_of_a_buffer_is_a_variable(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        model = nn.Linear(1, 1)
        model.register_buffer(
            "steps", Variable(0.0, trainable=False, aggregation=FIRST)
        )
        model.register_buffer(
            "rows", Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        )

    def step() -> None:
        model.steps.assign_add(torch.tensor(1.0))
        model.rows.assign_add(torch.tensor(2.0))

    several.run(step)
    several.run(step)
    assert (model.steps.item(), model.rows.item()) == (
        2.0,
        4.0 * several.num_replicas_in_sync,
    )
    assert model.state_dict()["steps"].item() == 2.0


def test_a_variable_with_one_copy_is_one_value(
    strategy: torchstrategy.Strategy,
) -> None:
    if has_components(strategy):
        return
    v = made(strategy, [1.0, 3.0])
    assert not isinstance(v, torchstrategy.DistributedValues)
    assert strategy.experimental_local_results(v) == (v,)
    assert strategy.reduce("mean", v, axis=None) is v
    assert repr(made(strategy, [1.0], name="w").cpu()) and repr(v).startswith(
        "Variable(tensor([1., 3.]"
    )


def test_a_step_that_is_given_a_variable_has_the_variable(
    strategy: torchstrategy.Strategy,
) -> None:
    v = made(strategy, 2.0, aggregation=MEAN)

    def step(v: Variable, nested: dict[str, list[Variable]]) -> Variable:
        assert nested["v"][0] is v
        return v.assign_add(torch.tensor(1.0))

    assert strategy.run(step, args=(v, {"v": [v]})) is v
    assert v.item() == 3.0
    assert strategy.run(lambda: v) is v


def test_update_writes_every_component(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 10.0)
    count = len(strategy.experimental_local_results(v))
    seen = []

    def write(component: Variable, x: float, scale: float = 1.0) -> dict[str, float]:
        seen.append(
            (
                component.item(),
                torchstrategy.in_cross_replica_context(),
                torchstrategy.get_strategy(),
            )
        )
        return {"now": component.assign_add(x * scale).item()}

    assert strategy.extended.update(v, write, (2.0,), {"scale": 2.0}, group=False) == {
        "now": (14.0,) * count
    }
    assert seen == [(10.0, True, strategy)] * count
    strategy.extended.update(v, lambda component: component.assign(1.0).item())
    assert components(strategy, v) == [1.0] * count
    assert numbers(strategy, lambda: v * 1) == [1.0] * strategy.num_replicas_in_sync


def test_update_is_given_what_was_reduced_to_the_variable(
    two: torchstrategy.Strategy,
) -> None:
    v = made(two, 10.0)
    each = two.run(lambda: torch.tensor(replica_id() + 1.0))
    reduced = two.extended.reduce_to("sum", each, destinations=v)
    two.extended.update(
        v, lambda component, x: component.assign_sub(x) and None, args=(reduced,)
    )
    assert components(two, v) == [7.0] * len(two.experimental_local_results(v))
    with pytest.raises(ValueError, match="a value for each replica"):
        two.extended.update(
            v, lambda component, x: component.assign(x) and None, args=(each,)
        )
    # What was written had no strategy.
    for other in (3, torch.ones(2), two.run(lambda: torch.ones(2)), None):
        with pytest.raises(
            TypeError, match=r"update writes a variable.*torchstrategy\.Variable\(value"
        ):
            two.extended.update(other, lambda component: component.add_(1))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        two.run(lambda: two.extended.update(v, lambda component: None))


def test_a_component_is_written_only_together_with_the_others(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v = made(two_mirrored, 1.0, trainable=False)
    first, second = two_mirrored.experimental_local_results(v)
    for write in (lambda: second.assign(2.0), lambda: second.add_(1)):
        with pytest.raises(RuntimeError, match="by itself"):
            write()
    v.assign(4.0)
    assert (first.item(), second.item(), (second + 1).item()) == (4.0, 4.0, 5.0)
    w = made(two_mirrored, 1.0, synchronization=ON_READ, aggregation=SUM)
    two_mirrored.experimental_local_results(w)[1].assign(5.0)
    assert w.item() == 6.0


def test_a_strategy_knows_its_variables(strategy: torchstrategy.Strategy) -> None:
    extended, v = strategy.extended, made(strategy, 1.0)
    elsewhere = made(central(2), 1.0)
    assert extended.variable_created_in_scope(
        v
    ) and not extended.variable_created_in_scope(elsewhere)
    for component in strategy.experimental_local_results(v):
        assert extended.value_container(component) is v
        assert extended.variable_created_in_scope(component)
    assert extended.value_container(3) == 3
    close(extended.read_var(v).detach(), torch.tensor(1.0))
    with strategy.scope(), extended.colocate_vars_with(v):
        assert Variable(2.0).device == v.device
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="created in this strategy's scope"),
    ):
        extended.colocate_vars_with(elsewhere)
    if strategy is not torchstrategy.get_strategy():
        with pytest.raises(RuntimeError, match="Need to be inside"):
            extended.colocate_vars_with(v)


def test_variables_are_where_the_strategy_keeps_parameters(
    strategy: torchstrategy.Strategy,
) -> None:
    v = made(strategy, torch.ones(1, device="cpu"))
    if strategy is torchstrategy.get_strategy():
        assert v.device.type == "cpu"
        return
    homes = [memory_device(device) for device in strategy.extended.parameter_devices]
    assert [
        component.device for component in strategy.experimental_local_results(v)
    ] == homes
    seen = strategy.experimental_local_results(strategy.run(lambda: (v * 1).device))
    assert list(seen) == [
        memory_device(device) for device in strategy.extended.worker_devices
    ]
