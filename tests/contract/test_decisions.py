"""What is done on purpose otherwise than in TensorFlow.

The situations are those in which one meets it.

Each docstring says what happens there and what happens here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrategy
from problems import context, replica_id, shown
from topologies import TOPOLOGIES, central, central_with_copies, mirrored
from torchstrategy import MirroredStrategy, OneDeviceStrategy, RunOptions, Strategy
from torchstrategy.compat import v1

ALONE: dict[str, Callable[[], Strategy]] = {
    "default": TOPOLOGIES["default"],
    "one_device": TOPOLOGIES["one_device"],
    "central_1": lambda: central(1),
    "copies_1": lambda: central_with_copies(1),
    "mirrored_1": lambda: mirrored(1),
}
OF_LISTS: list[Callable[[Any], Any]] = [
    torchstrategy.CentralStorageStrategy,
    MirroredStrategy,
    v1.experimental.CentralStorageStrategy,
    v1.MirroredStrategy,
]
EVERYWHERE = RunOptions(run_empty_replicas=True)
NO_AXIS = r"Scalars cannot be gathered: they have no axis\."


@pytest.fixture(params=ALONE)
def alone(request: pytest.FixtureRequest) -> Strategy:
    """Every strategy of one replica."""
    return ALONE[request.param]()


@pytest.fixture(params=[*TOPOLOGIES, "mirrored_1"])
def anyone(request: pytest.FixtureRequest) -> Strategy:
    """Every strategy."""
    return {**TOPOLOGIES, **ALONE}[request.param]()


def listed(strategy: Strategy, value: Any) -> list[Any]:
    """What each replica that is present has, as lists."""
    return [
        component.tolist() for component in strategy.experimental_local_results(value)
    ]


# The devices of a strategy


@pytest.mark.parametrize(
    "build",
    [
        OneDeviceStrategy,
        v1.OneDeviceStrategy,
        *(lambda d, of=of: of(["cpu", d]) for of in OF_LISTS),
    ],
)
def test_a_device_that_is_not_there_is_refused_when_the_strategy_is_made(
    build: Callable[[Any], Any],
) -> None:
    """TensorFlow makes a strategy of any well-formed name.

    It runs the strategy on the CPU without a word.
    """
    with pytest.raises(
        ValueError,
        match=r"^The device 'gpu:77' is not on this machine, which has .*cpu:0",
    ):
        build("gpu:77")


@pytest.mark.parametrize("of", OF_LISTS)
def test_a_device_that_is_listed_twice_is_two_replicas(
    of: Callable[[Any], Any],
) -> None:
    """TensorFlow refuses it for MirroredStrategy, by an AssertionError.

    It takes it for CentralStorageStrategy.
    """
    strategy = of(["cpu:1", "/device:CPU:1", torch.device("cpu", 1)])
    assert strategy.extended.worker_devices == (torch.device("cpu", 1),) * 3
    with strategy.scope():
        weight = torchstrategy.Variable(torch.ones(1))
    assert listed(strategy, strategy.run(lambda: weight * replica_id())) == [
        [0],
        [1],
        [2],
    ]


@pytest.mark.parametrize("nothing", [[], ()], ids=shown)
@pytest.mark.parametrize("of", OF_LISTS)
def test_a_list_of_no_devices_is_refused(
    of: Callable[[Any], Any], nothing: Any
) -> None:
    """TensorFlow makes of it a CentralStorageStrategy of no replicas.

    It makes a MirroredStrategy of all devices.
    """
    with pytest.raises(
        ValueError, match=r"^(compute_)?devices=(\[\]|\(\)) names no device to run on\."
    ):
        of(nothing)


# What a step is given


ELEMENTS: dict[str, Callable[[int], Any]] = {
    "batches": lambda k: torch.tensor([2 * k, 2 * k + 1]),
    "batches of many sizes": lambda k: torch.full((k % 3 + 1, 2), float(k)),
    "scalars": torch.tensor,
    "dicts": lambda k: {
        "x": torch.tensor([[float(k)]]),
        "y": torch.tensor([k], dtype=torch.int32),
    },
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "next": next,
    "get_next": lambda iterator: iterator.get_next(),
    "get_next_as_optional": lambda iterator: (
        iterator.get_next_as_optional().get_value()
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize(
    "whole", [0, 1], ids=["in the first step", "in the second step"]
)
def test_elements_of_a_function_that_do_not_fill_a_step_are_dealt(
    several: Strategy, whole: int, kind: str, way: str
) -> None:
    """TensorFlow drops them or deals them.

    That depends on the strategy, the way of asking and what it knows of their shapes.
    """
    replicas = several.num_replicas_in_sync
    elements = [ELEMENTS[kind](k) for k in range(whole * replicas + 1)]
    iterator = iter(several.distribute_datasets_from_function(lambda _: elements))
    for _ in range(whole):
        WAYS[way](iterator)
    mine, *others = several.experimental_local_results(WAYS[way](iterator))
    assert not iterator.get_next_as_optional().has_value()
    assert len(others) == replicas - 1
    torch.testing.assert_close(mine, elements[-1], check_device=False)
    nothing = (
        {name: column[:0] for name, column in mine.items()}
        if kind == "dicts"
        else torch.atleast_1d(mine)[:0]
    )
    for other in others:
        torch.testing.assert_close(other, nothing, check_device=False)


def test_a_replica_without_rows_sits_the_step_out(several: Strategy) -> None:
    """TensorFlow runs the step with tensors of no rows, as is done here on demand."""
    loader = DataLoader(range(5), batch_size=2)
    batches = list(several.experimental_distribute_dataset(loader))
    found = [several.run(lambda rows: rows + 1, args=(batch,)) for batch in batches]
    assert [listed(several, value) for value in found] == [
        [[1], [2]],
        [[3], [4]],
        [[5]],
    ]
    assert several.gather(found[-1], axis=0).tolist() == [5]
    assert several.reduce("mean", found[-1], axis=None).tolist() == [5]
    last = several.run(lambda rows: rows + 1, args=(batches[-1],), options=EVERYWHERE)
    assert listed(several, last) == [[5]] + [[]] * (several.num_replicas_in_sync - 1)


def test_a_batch_without_any_row_is_run_by_all(several: Strategy) -> None:
    """As in TensorFlow: were all to sit it out, there would be no result."""
    (batch,) = several.experimental_distribute_dataset([torch.ones(0, 2)])
    assert (
        listed(several, several.run(lambda rows: rows * 2, args=(batch,)))
        == [[]] * several.num_replicas_in_sync
    )


# Values of several replicas


USES: dict[str, Callable[[Strategy, Any], Any]] = {
    "run": lambda s, value: s.run(lambda x: x, args=(value,)),
    "reduce": lambda s, value: s.reduce("mean", value, axis=None),
    "reduce along an axis": lambda s, value: s.reduce("sum", value, axis=0),
    "gather": lambda s, value: s.gather(value, axis=0),
    "reduce_to": lambda s, value: s.extended.reduce_to("sum", value, "cpu"),
    "batch_reduce_to": lambda s, value: s.extended.batch_reduce_to(
        "mean", [(value, "cpu")]
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_value_of_a_larger_strategy_is_refused(anyone: Strategy, use: str) -> None:
    """TensorFlow leaves out the components for which there is no replica.

    Or it adds them up, or hands over the value.
    """
    replicas = anyone.num_replicas_in_sync
    value = central(replicas + 1).run(lambda: torch.ones(1) * replica_id())
    sentence = (
        rf"^A value with {replicas + 1} components was given to a strategy with "
        rf"{replicas} replicas?: "
    )
    with pytest.raises(ValueError, match=sentence):
        USES[use](anyone, value)


def test_a_value_of_one_component_is_that_component_to_a_lone_replica(
    alone: Strategy,
) -> None:
    """TensorFlow's one-device strategy hands over the value, which is no tensor."""
    value = central(1).experimental_distribute_values_from_function(
        lambda _: torch.tensor([1.0, 2.0])
    )
    assert type(value).__name__ == "PerReplica"
    expected = {
        "reduce": [1, 2],
        "reduce along an axis": 3,
        "gather": [1, 2],
        "reduce_to": [1, 2],
        "run": [1, 2],
    }
    assert {use: USES[use](alone, value).tolist() for use in expected} == expected


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "tuple": lambda x, y: (x, y),
}
SUMS: dict[str, tuple[Callable[[Strategy, Any], Any], Callable[[float], Any]]] = {
    "reduce": (
        lambda s, value: s.reduce("sum", value, axis=None),
        lambda total: [total],
    ),
    "reduce along an axis": (
        lambda s, value: s.reduce("sum", value, axis=0),
        lambda total: total,
    ),
    "reduce_to": (
        lambda s, value: s.extended.reduce_to("sum", value, "cpu"),
        lambda total: [total],
    ),
    "batch_reduce_to": (
        lambda s, value: s.extended.batch_reduce_to("sum", [(value, "cpu")])[0],
        lambda total: [total],
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("method", SUMS)
def test_a_container_is_reduced_leaf_by_leaf(
    anyone: Strategy, method: str, container: str
) -> None:
    """TensorFlow refuses it, since it is not distributed, or fails inside.

    Or TensorFlow returns it unreduced.
    """
    (reduce, shape), make, replicas = (
        SUMS[method],
        CONTAINERS[container],
        anyone.num_replicas_in_sync,
    )
    value = anyone.run(
        lambda: make(torch.ones(1) * replica_id(), torch.full((1,), 2.0))
    )
    expected = make(
        torch.tensor(shape(sum(range(replicas)))), torch.tensor(shape(2 * replicas))
    )
    torch.testing.assert_close(
        reduce(anyone, value), expected, check_device=False, check_dtype=False
    )


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_is_gathered_leaf_by_leaf(anyone: Strategy, container: str) -> None:
    """TensorFlow returns it, or one replica's part of it, and gathers nothing."""
    make, replicas = CONTAINERS[container], anyone.num_replicas_in_sync
    value = anyone.run(lambda: make(torch.ones(1) * replica_id(), torch.ones(2, 1)))
    expected = make(torch.arange(float(replicas)), torch.ones(2 * replicas, 1))
    torch.testing.assert_close(
        anyone.gather(value, axis=0), expected, check_device=False
    )


def test_a_list_of_numbers_is_a_container_that_has_no_axis(anyone: Strategy) -> None:
    """TensorFlow takes it for a tensor of one dimension."""
    with pytest.raises(
        ValueError,
        match=r"There is no axis 0 to reduce along: a value has the shape \(\)\.",
    ):
        anyone.reduce("sum", [1.0, 2.0], axis=0)
    torch.testing.assert_close(anyone.reduce("mean", [1.0, 2.0], axis=None), [1.0, 2.0])


def test_scalars_are_gathered_by_no_strategy(anyone: Strategy) -> None:
    """TensorFlow refuses those of several replicas, and returns that of a lone one."""
    with pytest.raises(ValueError, match=NO_AXIS):
        anyone.gather(anyone.run(lambda: torch.ones(()) * replica_id()), axis=0)
    with pytest.raises(ValueError, match=NO_AXIS):
        anyone.gather({"x": anyone.run(lambda: torch.ones(()) * replica_id())}, axis=0)


def test_a_plain_scalar_is_not_gathered_by_a_lone_replica(alone: Strategy) -> None:
    """TensorFlow returns it.

    With several replicas a plain value is not theirs, and comes back there and here.
    """
    with pytest.raises(ValueError, match=NO_AXIS):
        alone.gather(torch.tensor(1.0), axis=0)


def test_scalars_are_gathered_in_no_replica(anyone: Strategy) -> None:
    """TensorFlow refuses those of several replicas, and returns that of a lone one."""
    with pytest.raises(ValueError, match=NO_AXIS):
        anyone.run(lambda: context().all_gather(torch.ones(()) * replica_id(), axis=0))


def test_the_mean_of_integers_is_a_true_division(several: Strategy) -> None:
    """TensorFlow's is of float64, or of float32 where the integers are small.

    Here it is of the default dtype.
    """
    replicas = several.num_replicas_in_sync
    value = several.run(lambda: torch.full((1,), replica_id()))
    means = [
        several.reduce("mean", value, axis=None),
        several.extended.reduce_to("mean", value, "cpu"),
    ]
    means.append(several.reduce("mean", value, axis=0).reshape(1))
    means += several.experimental_local_results(
        several.run(lambda x: context().all_reduce("mean", x), args=(value,))
    )
    for mean in means:
        torch.testing.assert_close(
            mean, torch.tensor([(replicas - 1) / 2]), check_device=False
        )


# One replica


def test_a_lone_replica_runs_on_the_callers_thread_and_gives_plain_values(
    alone: Strategy,
) -> None:
    """TensorFlow gives plain values too.

    It gives them from another thread where the strategy can have several replicas.
    """
    assert alone.run(threading.get_ident) == threading.get_ident()
    value = alone.run(lambda: {"x": torch.ones(2)})
    assert type(value["x"]) is torch.Tensor
    assert alone.experimental_local_results(value["x"]) == (value["x"],)


# Logical devices


LOGICAL: dict[str, Callable[[Strategy, torch.Tensor], torch.Tensor]] = {
    "assign": lambda s, x: s.experimental_assign_to_logical_device(x, 0),
    "split": lambda s, x: s.experimental_split_to_logical_devices(x, [1, 1]),
    "replicate": lambda s, x: s.experimental_replicate_to_logical_devices(x),
}


@pytest.mark.parametrize("method", LOGICAL)
def test_each_replica_has_one_logical_device(anyone: Strategy, method: str) -> None:
    """TensorFlow has them on TPUs only, and raises NotImplementedError.

    Here a tensor is at the one there is.
    """

    def step() -> bool:
        tensor = torch.ones(1, 2)
        return LOGICAL[method](anyone, tensor) is tensor

    assert step()
    assert anyone.run(step) is True
