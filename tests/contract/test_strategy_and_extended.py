"""What else a strategy has: values from functions, logical devices, copies.

`extended`, too.
"""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from problems import replica_id, shown
from runs import REBUILD, Opaque, from_each, one_of, partial, per_replica
from topologies import TOPOLOGIES, central
from torchstrategy import (
    CentralStorageStrategy,
    DistributedValues,
    OneDeviceStrategy,
    ReduceOp,
    Strategy,
    ValueContext,
    get_strategy,
)

DEFAULT = get_strategy()


# Strategy.experimental_distribute_values_from_function


@pytest.mark.parametrize("topology", REBUILD)
def test_a_value_function_is_called_for_each_replica_in_order(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    n = strategy.num_replicas_in_sync
    seen: list[tuple[ValueContext, int]] = []

    def value_fn(asked: ValueContext) -> float:
        seen.append((asked, threading.get_ident()))
        return asked.replica_id_in_sync_group + 0.5

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [(ValueContext(r, n), threading.get_ident()) for r in range(n)]
    assert isinstance(value, DistributedValues)
    assert value.values == tuple(r + 0.5 for r in range(n))


@pytest.mark.parametrize("topology", REBUILD)
@pytest.mark.parametrize("same", [7, None, "text", torch.ones(1)], ids=shown)
def test_a_value_function_makes_a_distributed_value_also_of_one_object(
    topology: str, same: object
) -> None:
    strategy = TOPOLOGIES[topology]()
    value = strategy.experimental_distribute_values_from_function(lambda _: same)
    assert isinstance(value, DistributedValues)
    assert len(value.values) == strategy.num_replicas_in_sync
    assert all(component is same for component in value.values)


def test_a_value_function_may_return_containers(several: Strategy) -> None:
    value = several.experimental_distribute_values_from_function(
        lambda c: {"a": [c.replica_id_in_sync_group, 7]}
    )
    n = several.num_replicas_in_sync
    assert value["a"][0].values == tuple(range(n))
    assert value["a"][1].values == (7,) * n


def test_a_value_function_of_different_structures_is_refused(several: Strategy) -> None:
    with pytest.raises(ValueError, match=r"^Replicas 0 and 1 .*of different structure"):
        several.experimental_distribute_values_from_function(
            lambda c: [0] * c.replica_id_in_sync_group
        )


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_a_value_function_of_a_single_replica_returns_what_it_returns(
    topology: str,
) -> None:
    made = Opaque()
    seen: list[ValueContext] = []
    strategy = TOPOLOGIES[topology]()
    assert (
        strategy.experimental_distribute_values_from_function(
            lambda c: seen.append(c) or made
        )
        is made
    )
    assert seen == [ValueContext(0, 1)]


def test_a_value_function_must_be_callable(kind: Strategy) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"^value_fn is called with a ValueContext for each replica; 3 cannot be "
            r"called\."
        ),
    ):
        kind.experimental_distribute_values_from_function(3)


def test_what_a_value_function_raises_comes_out(kind: Strategy) -> None:
    with pytest.raises(AttributeError, match=r"replica_id"):
        kind.experimental_distribute_values_from_function(lambda c: c.replica_id)


def test_a_value_context_is_two_numbers_that_stay() -> None:
    assert ValueContext() == ValueContext(
        replica_id_in_sync_group=0, num_replicas_in_sync=1
    )
    assert (
        str(ValueContext(1, 4))
        == "torchstrategy.ValueContext(replica id 1, total replicas in sync: 4)"
    )
    with pytest.raises(FrozenInstanceError):
        ValueContext().num_replicas_in_sync = 2


# Logical devices: each replica has one


@pytest.mark.parametrize("number", [-1, 1, 7])
def test_there_is_no_other_logical_device(kind: Strategy, number: int) -> None:
    sentence = rf"^Each replica has 1 logical device, number 0; there is no {number}\."
    with pytest.raises(ValueError, match=sentence):
        kind.experimental_assign_to_logical_device(torch.ones(1), number)


SPLITS: dict[str, tuple[tuple[int, ...], list[int], str]] = {
    "too few numbers": (
        (2, 2),
        [1],
        r"partition_dimensions=\[1\] has 1 numbers? for a tensor of 2 dimensions",
    ),
    "too many numbers": (
        (2,),
        [1, 1],
        r"partition_dimensions=\[1, 1\] has 2 numbers for a tensor of 1 dimensions?",
    ),
    "the number comes before the division": (
        (3, 2),
        [2],
        r"partition_dimensions=\[2\] has 1 numbers?",
    ),
    "does not divide": (
        (3, 2),
        [2, 1],
        r"partition_dimensions=\[2, 1\] does not divide a tensor of shape \(3, 2\)",
    ),
    "zero": (
        (2,),
        [0],
        r"partition_dimensions=\[0\] does not divide a tensor of shape \(2,\)",
    ),
    "negative": (
        (2,),
        [-1],
        r"partition_dimensions=\[-1\] does not divide a tensor of shape \(2,\)",
    ),
    "the division comes before the product": (
        (4, 3),
        [2, 2],
        r"partition_dimensions=\[2, 2\] does not divide",
    ),
    "too many parts": (
        (4, 3),
        [2, 3],
        r"partition_dimensions=\[2, 3\] asks for 6 parts",
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_what_needs_more_than_one_logical_device_is_refused(
    kind: Strategy, case: str
) -> None:
    shape, partition, sentence = SPLITS[case]
    with pytest.raises(ValueError, match="^" + sentence):
        kind.experimental_split_to_logical_devices(torch.ones(shape), partition)


# Strategy.extended


def test_worker_and_parameter_devices_are_tuples_of_devices() -> None:
    extended = CentralStorageStrategy(["cpu:1", "/cpu:2"], "CPU:3").extended
    # The strategy is gone; its devices are still known.
    assert extended.worker_devices == (torch.device("cpu", 1), torch.device("cpu", 2))
    assert extended.parameter_devices == (torch.device("cpu", 3),)
    one = OneDeviceStrategy("cpu:1").extended
    assert one.worker_devices == one.parameter_devices == (torch.device("cpu", 1),)


@pytest.mark.parametrize("name", ["worker_devices", "parameter_devices"])
def test_the_default_strategy_has_no_devices(name: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"^The default strategy has no devices of its own: "
    ):
        getattr(DEFAULT.extended, name)


def test_shapes_may_vary(kind: Strategy) -> None:
    assert kind.extended.experimental_require_static_shapes is False


def test_there_is_no_cluster(kind: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:1"]}}')
    assert kind.cluster_resolver is None


@pytest.mark.parametrize(
    "name", ["num_replicas_in_sync", "extended", "cluster_resolver"]
)
def test_what_a_strategy_is_cannot_be_set(kind: Strategy, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(kind, name, 3)


def test_an_extended_without_its_strategy_says_so() -> None:
    extended = central(2).extended
    gc.collect()
    with pytest.raises(
        RuntimeError, match=r"^The strategy of this `extended` is gone\."
    ):
        extended.call_for_each_replica(lambda: None)


def test_call_for_each_replica_does_what_run_does(strategy: Strategy) -> None:
    ids = strategy.extended.call_for_each_replica(
        lambda a, *, b: a + b + replica_id(), args=(1000,), kwargs={"b": 1}
    )
    n = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(ids) == tuple(1001 + r for r in range(n))
    assert one_of(strategy, strategy.extended.call_for_each_replica(lambda: 1)) == 1


def test_call_for_each_replica_does_not_ask_for_a_tuple(strategy: Strategy) -> None:
    assert (
        one_of(
            strategy,
            strategy.extended.call_for_each_replica(
                lambda a, b: a * b, args=iter([3, 4])
            ),
        )
        == 12
    )


@pytest.mark.parametrize("op", ["sum", ReduceOp.MEAN])
def test_reduce_to_a_device_gives_a_tensor(several: Strategy, op: Any) -> None:
    n = several.num_replicas_in_sync
    value = several.run(lambda: {"x": torch.ones(2) * (replica_id() + 1)})
    expected = n * (n + 1) / 2 / (1 if op == "sum" else n)
    for destination in ("cpu:0", "/cpu:1", torch.device("cpu"), torch.zeros(3)):
        reduced = several.extended.reduce_to(op, value, destination)["x"]
        assert type(reduced) is torch.Tensor
        assert reduced.tolist() == [expected] * 2


def test_reduce_to_a_distributed_value_gives_a_copy_for_each_component(
    several: Strategy,
) -> None:
    value = several.run(lambda: torch.ones(2))
    reduced = several.extended.reduce_to("sum", value, value)
    assert isinstance(reduced, DistributedValues)
    n = several.num_replicas_in_sync
    assert [component.tolist() for component in reduced.values] == [[n, n]] * n
    assert (
        several.run(lambda x: x is reduced.values[replica_id()], args=(reduced,))
        is True
    )


def test_what_was_reduced_for_those_present_is_run_by_those_present() -> None:
    strategy, batch = partial()
    value = strategy.run(lambda x: x + 1, args=(batch,))
    reduced = strategy.extended.reduce_to("sum", value, value)
    assert strategy.run(lambda x: int(x) + 1000, args=(reduced,)).values == (1003, 1003)


@pytest.mark.parametrize("topology", ["default", "one_device"])
def test_reduce_to_gives_a_single_replicas_value_itself(topology: str) -> None:
    strategy, value = TOPOLOGIES[topology](), torch.tensor([1, 2])
    for op in ("sum", "mean"):
        reduced = strategy.extended.reduce_to(op, value, "cpu")
        assert torch.equal(reduced, value)
        assert reduced.dtype is torch.int64


def test_reduce_to_of_a_plain_value_is_as_reduce(several: Strategy) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^A value that is not distributed, tensor\(\[1\.\]\), cannot be summed "
            r"over "
        ),
    ):
        several.extended.reduce_to("sum", torch.ones(1), "cpu")
    assert several.extended.reduce_to("mean", torch.ones(1), "cpu").tolist() == [1]


REDUCE_TO_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no destination": (
        {"destinations": None},
        ValueError,
        r"destinations says where the result goes: ",
    ),
    "a list of destinations": (
        {"destinations": ["cpu"]},
        TypeError,
        r"destinations is one device, tensor or ",
    ),
    "a tuple of destinations": (
        {"destinations": ("cpu",)},
        TypeError,
        r"destinations is one device, tensor or ",
    ),
    "an unknown destination": (
        {"destinations": "foo"},
        ValueError,
        r"'foo' is not a device: ",
    ),
    "an absent destination": (
        {"destinations": "xpu:7"},
        ValueError,
        r"The device 'xpu:7' is not on this machine",
    ),
    "an unknown reduction": (
        {"reduce_op": "max"},
        ValueError,
        r"'max' is not one of the reductions 'SUM', 'MEAN'\.",
    ),
    "no reduction": (
        {"reduce_op": None},
        TypeError,
        r"Expected reduce_op to be a torchstrategy\.ReduceOp or its name",
    ),
    "options": ({"options": 3}, ValueError, r"reduce_to\(options=3\): "),
}


@pytest.mark.parametrize("case", REDUCE_TO_ERRORS)
def test_reduce_to_says_what_is_wrong(several: Strategy, case: str) -> None:
    wrong, error, sentence = REDUCE_TO_ERRORS[case]
    value = several.run(lambda: torch.ones(1))
    with pytest.raises(error, match="^" + sentence):
        several.extended.reduce_to(
            **{"reduce_op": "sum", "value": value, "destinations": "cpu", **wrong}
        )


def test_a_destination_without_a_device_is_refused() -> None:
    strategy = central(2)
    value, numbers = (
        strategy.run(lambda: torch.ones(1)),
        per_replica(strategy, [1.5, 2.5]),
    )
    with pytest.raises((TypeError, ValueError), match=r"^destinations?\b"):
        strategy.extended.reduce_to("sum", value, numbers)


def test_batch_reduce_to_reduces_each_pair(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    one, two = (
        several.run(lambda: torch.ones(1)),
        several.run(lambda: torch.ones(1) * 2),
    )
    first, second = several.extended.batch_reduce_to("sum", [(one, "cpu"), (two, two)])
    assert first.tolist() == [n]
    assert [component.tolist() for component in second.values] == [[2 * n]] * n
    assert several.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize("pair", [[1, "cpu"], (1,), (1, "cpu", 2), 1], ids=shown)
def test_batch_reduce_to_takes_pairs(kind: Strategy, pair: Any) -> None:
    sentence = (
        r"^batch_reduce_to takes \(value, destinations\) pairs; got "
        rf"{re.escape(repr(pair))}\."
    )
    with pytest.raises(ValueError, match=sentence):
        kind.extended.batch_reduce_to("mean", [pair])


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_a_module_and_its_parameters_are_known_to_their_strategy(topology: str) -> None:
    strategy, other = TOPOLOGIES[topology](), TOPOLOGIES[topology]()
    outside = torch.nn.Linear(1, 1)
    with strategy.scope():
        inside = torch.nn.Sequential(torch.nn.Linear(1, 1))
    for thing in (inside, inside[0], inside[0].weight):
        assert strategy.extended.variable_created_in_scope(thing) is True
        assert other.extended.variable_created_in_scope(thing) is False
        assert DEFAULT.extended.variable_created_in_scope(thing) is False
    for thing in (outside, outside.weight):
        assert strategy.extended.variable_created_in_scope(thing) is False
        assert DEFAULT.extended.variable_created_in_scope(thing) is True
    assert (
        strategy.extended.variable_created_in_scope(
            strategy.distribute_module(outside).weight
        )
        is True
    )


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_so_is_a_parameter_that_came_with_a_checkpoint(topology: str) -> None:
    """A random program: `load_state_dict(assign=True)` tells nobody.

    An optimizer of the new ones was nobody's.
    """
    strategy, other = TOPOLOGIES[topology](), TOPOLOGIES[topology]()
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    first = model[0].weight
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )
    assert strategy.extended.variable_created_in_scope(model[0].weight) is True
    assert other.extended.variable_created_in_scope(model[0].weight) is False
    assert DEFAULT.extended.variable_created_in_scope(model[0].weight) is False
    assert strategy.extended.variable_created_in_scope(first) is False


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (torch.nn.ReLU, lambda it: it),
        (lambda: torch.nn.ParameterList([torch.ones(1)]), lambda it: it[0]),
    ],
    ids=["module", "parameter"],
)
def test_a_module_without_parameters_and_a_parameter_of_a_module_are_known_too(
    make: Callable[[], Any], part: Callable[[Any], Any]
) -> None:
    strategy = central(2)
    with strategy.scope():
        module = make()
    outside = make()
    assert strategy.extended.variable_created_in_scope(part(module)) is True
    assert strategy.extended.variable_created_in_scope(part(outside)) is False


@pytest.mark.parametrize("junk", [3, None, "weight"], ids=shown)
def test_only_modules_and_parameters_can_have_been_created_in_a_scope(
    kind: Strategy, junk: Any
) -> None:
    with pytest.raises(
        TypeError,
        match=r"^variable_created_in_scope asks about a module or a parameter; got ",
    ):
        kind.extended.variable_created_in_scope(junk)


# Copies


def test_a_strategy_must_not_be_copied_shallowly(strategy: Strategy) -> None:
    with pytest.raises(RuntimeError, match=r"^Must only deepcopy a Strategy: "):
        copy.copy(strategy)


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "default"])
def test_a_deep_copy_is_another_strategy_of_the_same_kind(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    first, second = copy.deepcopy([strategy, strategy])
    assert first is second
    assert first is not strategy
    assert type(first) is type(strategy)
    assert first.num_replicas_in_sync == strategy.num_replicas_in_sync
    assert first.extended.worker_devices == strategy.extended.worker_devices
    assert first.extended.parameter_devices == strategy.extended.parameter_devices
    assert first.extended.variable_created_in_scope(model) is False
    assert from_each(first, first.run(replica_id)) == list(
        range(strategy.num_replicas_in_sync)
    )
    with (
        strategy.scope(),
        pytest.raises(
            RuntimeError, match=r"^Mixing different torchstrategy\.Strategy objects: "
        ),
    ):
        first.run(lambda: None)


def test_a_deep_copy_reduces_gradients_as_the_original_does() -> None:
    strategy = copy.deepcopy(central(2, gradient_reduction="sum"))
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    strategy.run(lambda: model(torch.ones(1)).sum().backward())
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2


def test_the_default_strategy_is_not_copied() -> None:
    with pytest.raises(
        RuntimeError,
        match=(
            r"^There is one default strategy; torchstrategy\.get_strategy\(\) returns "
            r"it"
        ),
    ):
        copy.deepcopy(DEFAULT)


def test_a_strategy_is_made_of_its_extended() -> None:
    with pytest.raises(TypeError):
        Strategy()
