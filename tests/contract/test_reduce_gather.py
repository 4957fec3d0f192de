"""How values become one: reduce and gather outside, all_reduce and all_gather in the replicas, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from problems import close, context, replica_id, shown
from topologies import TOPOLOGIES, central, central_with_copies
from torchstrategy import OneDeviceStrategy, ReduceOp, RunOptions, Strategy

DEFAULT = torchstrategy.get_strategy()
ONE = OneDeviceStrategy("cpu")
TWO = central(2)
SINGLE = ["default", "one_device"]  # on the user's own objects: whatever is not distributed is reduced already
NO_SUM = r"^The replicas' values cannot be added: "
NO_CAT = r"^The replicas' values cannot be gathered along axis {}: "
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture(params=["default", "one_device", "central_1", "central_3"])
def kind(request: pytest.FixtureRequest) -> Strategy:
    """One strategy of each kind, for what does not depend on the number of replicas."""
    return TOPOLOGIES[request.param]()


class Pair(NamedTuple):
    first: Any
    second: Any


def per_replica(strategy: Strategy, components: Sequence[Any]) -> Any:
    """A value with these components, tensors of what is in lists."""
    tensors = [torch.tensor(c) if isinstance(c, (list, float)) else c for c in components]
    return strategy.experimental_distribute_values_from_function(lambda c: tensors[c.replica_id_in_sync_group])


def in_replicas(strategy: Strategy, fn: Callable[..., Any], *components: Sequence[Any]) -> list[Any]:
    """What `fn` returns in each replica for its component of each of the values."""
    args = tuple(per_replica(strategy, values) for values in components)
    return list(strategy.experimental_local_results(strategy.run(fn, args=args)))


def dealt(strategy: Strategy, rows: torch.Tensor) -> Any:
    return next(iter(strategy.experimental_distribute_dataset([rows])))


# Strategy.reduce over the replicas


@pytest.mark.parametrize(("op", "expected"), [("sum", [4.0, 6.0, 8.0, 10.0]), ("mean", [2.0, 3.0, 4.0, 5.0])])
def test_components_are_reduced_element_by_element(op: str, expected: list[float]) -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    assert TWO.reduce(op, value, axis=None).tolist() == expected


@pytest.mark.parametrize(("op", "expected"), [("sum", 28.0), ("mean", 3.5)])
def test_components_are_reduced_along_an_axis_too(op: str, expected: float) -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    assert TWO.reduce(op, value, axis=0).item() == expected


@pytest.mark.parametrize("name", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_a_reduction_may_be_named_in_any_case(kind: Strategy, name: Any) -> None:
    assert kind.reduce(name, kind.run(lambda: torch.ones(2) * 1), axis=0) == 2 * kind.num_replicas_in_sync


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("junk", ["max", "", "sum "])
def test_an_unknown_reduction_is_refused(kind: Strategy, junk: str, axis: int | None) -> None:
    with pytest.raises(ValueError, match=rf"^'{junk}' is not one of the reductions 'SUM', 'MEAN'\."):
        kind.reduce(junk, torch.ones(2), axis=axis)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("junk", [None, 0, sum, torch.ones(1)], ids=shown)
def test_what_is_no_reduction_is_refused(kind: Strategy, junk: Any, axis: int | None) -> None:
    with pytest.raises(
        TypeError, match=r"^Expected reduce_op to be a torchstrategy\.ReduceOp or its name, 'SUM' or 'M"
    ):
        kind.reduce(junk, torch.ones(2), axis=axis)


def test_the_axis_has_to_be_said(kind: Strategy) -> None:
    with pytest.raises(TypeError, match=r"axis"):
        kind.reduce("sum", torch.ones(2))
    with pytest.raises(TypeError, match=r"axis"):
        kind.gather(torch.ones(2))


@pytest.mark.parametrize("components", [[[1.0, 2.0], [1.0]], [[[1.0, 2.0]], [1.0, 2.0]], [[1.0], 1.0]], ids=shown)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_components_of_different_shapes_are_not_added(op: str, components: list[Any]) -> None:
    with pytest.raises(ValueError, match=NO_SUM):
        TWO.reduce(op, per_replica(TWO, components), axis=None)


def test_the_error_shows_the_shapes_and_dtypes() -> None:
    value = per_replica(TWO, [[1.0, 2.0], [1]])
    with pytest.raises(ValueError, match=NO_SUM + r"\(2,\) torch\.float32 and \(1,\) torch\.int64\."):
        TWO.reduce("sum", value, axis=None)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("components", [["a", "b"], [None, 1.0], [{1}, {2}]], ids=shown)
def test_what_has_no_numbers_is_not_added(components: list[Any], axis: int | None) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"^Only tensors, arrays and numbers can be combined across replicas"
    ):
        TWO.reduce("sum", per_replica(TWO, components), axis=axis)


def test_numbers_and_arrays_that_run_returned_are_reduced() -> None:
    assert TWO.reduce("sum", TWO.run(lambda: replica_id() + 1000), axis=None).item() == 2001
    assert TWO.reduce("mean", TWO.run(lambda: replica_id() + 0.5), axis=None).item() == 1
    assert TWO.reduce("sum", TWO.run(lambda: np.array([1.0, replica_id()])), axis=None).tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64])
def test_a_sum_keeps_the_dtype(dtype: torch.dtype) -> None:
    value = per_replica(TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 4], dtype=dtype)])
    assert TWO.reduce("sum", value, axis=None).dtype is dtype
    assert TWO.reduce("sum", value, axis=0).dtype is dtype
    assert TWO.reduce("sum", value, axis=0).item() == 10


def test_a_sum_wraps_around_as_its_dtype_does() -> None:
    value = per_replica(TWO, [torch.tensor([200, 1], dtype=torch.uint8), torch.tensor([100, 1], dtype=torch.uint8)])
    assert TWO.reduce("sum", value, axis=None).tolist() == [44, 2]
    assert TWO.reduce("sum", value, axis=0).item() == 46


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("axis", [None, 0])
def test_the_mean_of_integers_is_of_the_default_dtype(dtype: torch.dtype, axis: int | None) -> None:
    value = per_replica(TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([2, 5], dtype=dtype)])
    mean = TWO.reduce("mean", value, axis=axis)
    assert mean.dtype is torch.get_default_dtype()
    assert mean.tolist() == (2.5 if axis == 0 else [1.5, 3.5])


def test_the_mean_of_integers_follows_the_default_dtype() -> None:
    value = per_replica(TWO, [[1, 2], [2, 5]])
    torch.set_default_dtype(torch.float64)
    try:
        assert TWO.reduce("mean", value, axis=None).dtype is torch.float64
        assert TWO.reduce("mean", value, axis=0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("axis", [None, 0])
def test_the_mean_of_other_numbers_keeps_the_dtype(dtype: torch.dtype, axis: int | None) -> None:
    value = per_replica(TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 4], dtype=dtype)])
    mean = TWO.reduce("mean", value, axis=axis)
    assert mean.dtype is dtype
    assert mean.tolist() == (2.5 if axis == 0 else [2, 3])


def test_reducing_leaves_the_components_as_they_are(several: Strategy) -> None:
    value = several.run(lambda: torch.ones(2) * replica_id())
    before = [component.clone() for component in value.values]
    for op in ("sum", "mean"):
        for axis in (None, 0):
            several.reduce(op, value, axis=axis).add_(5)
    several.gather(value, axis=0).add_(5)
    assert all(map(torch.equal, value.values, before))


def test_reducing_the_value_of_the_lone_replica_present_makes_a_tensor_of_its_own() -> None:
    value = TWO.run(lambda x: x, args=(dealt(TWO, torch.ones(1)),))
    for reduced in (
        TWO.reduce("sum", value, axis=None),
        TWO.reduce("mean", value, axis=None),
        TWO.gather(value, axis=0),
    ):
        reduced.add_(5)
    assert value.values[0].tolist() == [1]


# Strategy.reduce along an axis


@pytest.mark.parametrize(("op", "expected"), [("sum", 15.0), ("mean", 2.5)])
def test_the_mean_over_uneven_rows_is_the_mean_over_all_rows(op: str, expected: float) -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]])
    assert TWO.reduce(op, value, axis=0).item() == expected


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("mean", 1.5)])
def test_no_rows_add_nothing_and_count_nothing(op: str, expected: float) -> None:
    assert TWO.reduce(op, per_replica(TWO, [[1.0, 2.0], []]), axis=0).item() == expected


def test_the_mean_of_no_rows_at_all_is_nan() -> None:
    assert TWO.reduce("mean", per_replica(TWO, [[], []]), axis=0).isnan()


AXES: dict[Any, tuple[Any, Any]] = {
    0: ([16.0, 20.0], [4.0, 5.0]),
    -2: ([16.0, 20.0], [4.0, 5.0]),
    1: ([14.0, 22.0], [3.5, 5.5]),
    -1: ([14.0, 22.0], [3.5, 5.5]),
    (0, 1): (36.0, 4.5),
    (-1, 0): (36.0, 4.5),
    (1,): ([14.0, 22.0], [3.5, 5.5]),
}


@pytest.mark.parametrize("axis", AXES)
def test_any_axis_or_several_can_be_reduced_along(axis: Any) -> None:
    value = per_replica(TWO, [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    assert TWO.reduce("sum", value, axis=axis).tolist() == AXES[axis][0]
    assert TWO.reduce("mean", value, axis=axis).tolist() == AXES[axis][1]


def test_sums_of_different_shapes_are_not_added() -> None:
    value = per_replica(TWO, [[[1.0, 1.0, 1.0]] * 2, [[1.0, 1.0, 1.0]]])
    assert TWO.reduce("mean", value, axis=0).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=NO_SUM):
        TWO.reduce("mean", value, axis=1)


@pytest.mark.parametrize("axis", [1, -2, 7, (0, 1)])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_an_axis_that_is_not_there_is_refused(kind: Strategy, op: str, axis: Any) -> None:
    value = kind.run(lambda: torch.ones(3) * 1)
    missing = 1 if axis == (0, 1) else axis
    with pytest.raises(
        ValueError, match=rf"^There is no axis {missing} to reduce along: a value has the shape \(3,\)\."
    ):
        kind.reduce(op, value, axis=axis)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_scalars_have_no_axis_to_reduce_along(kind: Strategy, op: str) -> None:
    with pytest.raises(ValueError, match=r"^There is no axis 0 to reduce along: a value has the shape \(\)\."):
        kind.reduce(op, kind.run(lambda: torch.tensor(1.0)), axis=0)


@pytest.mark.parametrize("axis", [0.0, "0", [0], (0, 0.5)], ids=shown)
def test_an_axis_is_an_integer(kind: Strategy, axis: Any) -> None:
    with pytest.raises(TypeError, match=r"^The axis to reduce along is an integer or a tuple of them; got "):
        kind.reduce("sum", kind.run(lambda: torch.ones(2)), axis=axis)


@pytest.mark.parametrize("axis", [(0, 0), (0, -1)], ids=shown)
def test_an_axis_cannot_be_reduced_along_twice(kind: Strategy, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"axis"):
        kind.reduce("sum", kind.run(lambda: torch.ones(2)), axis=axis)


def test_reducing_along_no_axis_at_all_is_reducing_over_the_replicas(several: Strategy) -> None:
    value = several.run(lambda: torch.tensor([1.0, 2.0]) * replica_id())
    for op in ("sum", "mean"):
        assert torch.equal(several.reduce(op, value, axis=()), several.reduce(op, value, axis=None))


def test_booleans_are_counted_along_an_axis() -> None:
    value = per_replica(TWO, [torch.tensor([True, False, True]), torch.tensor([True])])
    assert TWO.reduce("sum", value, axis=0).item() == 3
    assert TWO.reduce("mean", value, axis=0).item() == 0.75


# Strategy.reduce of what is not distributed


def test_a_plain_value_is_not_summed_over_several_replicas(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    for plain in (torch.ones(2), torch.tensor(0.5), 1.0, "text", None):
        sentence = rf"^A value that is not distributed, .*, cannot be summed over {n} replicas: "
        with pytest.raises(ValueError, match=sentence):
            several.reduce("sum", plain, axis=None)


def test_the_mean_of_a_plain_value_is_itself(strategy: Strategy) -> None:
    for plain in (torch.ones(2), 3, None, "text", np.ones(2)):
        assert strategy.reduce("mean", plain, axis=None) is plain


def test_a_plain_zero_stays_zero_in_any_reduction(strategy: Strategy) -> None:
    for op in ("sum", "mean"):
        for zero in (0, 0.0):
            assert strategy.reduce(op, zero, axis=None) == 0


def test_along_an_axis_a_plain_value_counts_as_the_same_in_every_replica(strategy: Strategy) -> None:
    for plain in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])):
        assert strategy.reduce("sum", plain, axis=0).item() == 3 * strategy.num_replicas_in_sync
        assert strategy.reduce("mean", plain, axis=0).item() == 1.5


def test_a_reduction_that_is_reduced_again_counts_again() -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    once = TWO.reduce("sum", value, axis=None)
    assert TWO.reduce("sum", once, axis=0).item() == 56
    assert TWO.reduce("sum", value, axis=0).item() == 28


@pytest.mark.parametrize("topology", SINGLE)
@pytest.mark.parametrize("value", [torch.ones(2), 3, None, "text", object()], ids=shown)
def test_a_single_replica_reduces_anything_to_itself(topology: str, value: object) -> None:
    strategy = TOPOLOGIES[topology]()
    for op in ("sum", "mean"):
        assert strategy.reduce(op, value, axis=None) is value


@pytest.mark.parametrize("topology", SINGLE)
def test_a_single_replica_reduces_along_an_axis(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    assert strategy.reduce("sum", torch.arange(10), axis=0).item() == 45
    assert strategy.reduce("mean", torch.arange(10), axis=0).item() == 4.5
    assert strategy.reduce("sum", torch.arange(4.0).reshape(2, 2), axis=(0, 1)).item() == 6


@pytest.mark.parametrize("topology", ["central_1", "copies_1"])
def test_the_sum_over_one_replica_is_a_tensor_of_its_own(topology: str) -> None:
    strategy, value = TOPOLOGIES[topology](), torch.ones(2)
    reduced = strategy.reduce("sum", value, axis=None)
    assert torch.equal(reduced, value)
    assert reduced.data_ptr() != value.data_ptr()
    assert strategy.reduce("sum", 3, axis=None).item() == 3


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("method", ["reduce", "reduce along an axis", "gather"])
def test_a_value_with_another_number_of_components_is_refused(method: str, components: int) -> None:
    value = per_replica(central(components), [[1.0]] * components)
    with pytest.raises(ValueError, match=rf"^A value with {components} components? was given to a strategy with 2 "):
        if method == "gather":
            TWO.gather(value, axis=0)
        else:
            TWO.reduce("sum", value, axis=0 if method == "reduce along an axis" else None)


# Nested values: where TensorFlow refuses them or leaves them as they are


def test_containers_are_reduced_leaf_by_leaf(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = several.run(lambda: {"a": torch.ones(2) * 1, "b": [(torch.tensor(float(replica_id())),), Pair(2.5, None)]})
    mean = several.reduce("mean", value, axis=None)
    assert type(mean) is dict
    assert type(mean["b"][1]) is Pair
    assert mean["a"].tolist() == [1, 1]
    assert mean["b"][0][0].item() == (n - 1) / 2
    assert mean["b"][1] == Pair(2.5, None)
    assert several.reduce("sum", {"a": value["a"]}, axis=0)["a"].item() == 2 * n


def test_containers_are_gathered_leaf_by_leaf(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = several.run(lambda: {"a": torch.ones(1) * replica_id(), "b": Pair(torch.ones(2, 1) * 1, "text")})
    gathered = several.gather(value, axis=0)
    assert gathered["a"].tolist() == list(range(n))
    assert gathered["b"].first.shape == (2 * n, 1)
    assert gathered["b"].second == "text"


def test_a_single_replica_gives_containers_back_as_they_are() -> None:
    value = {"a": torch.ones(2)}
    assert ONE.reduce("sum", value, axis=None)["a"] is value["a"]
    assert ONE.gather(value, axis=0)["a"] is value["a"]
    assert ONE.reduce("sum", value, axis=0)["a"].item() == 2


def test_a_plain_list_of_numbers_is_a_container_of_scalars(several: Strategy) -> None:
    with pytest.raises(ValueError, match=r"^There is no axis 0 to reduce along: a value has the shape \(\)\."):
        several.reduce("mean", [1.0, 2.0], axis=0)
    assert several.reduce("mean", [1.0, 2.0], axis=None) == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"^A value that is not distributed, 1\.0, cannot be summed "):
        several.reduce("sum", [1.0, 2.0], axis=None)


# Strategy.gather


def test_components_are_gathered_in_replica_order(several: Strategy) -> None:
    value = several.run(lambda: torch.full((1, 2), float(replica_id())))
    n = several.num_replicas_in_sync
    assert several.gather(value, axis=0).tolist() == [[r, r] for r in range(n)]
    assert several.gather(value, axis=1).tolist() == [[r for r in range(n) for _ in range(2)]]
    assert torch.equal(several.gather(value, axis=-1), several.gather(value, axis=1))
    assert torch.equal(several.gather(value, axis=-2), several.gather(value, axis=0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.complex64])
def test_anything_can_be_gathered_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    value = per_replica(TWO, [torch.tensor([1, 0], dtype=dtype), torch.tensor([1], dtype=dtype)])
    assert TWO.gather(value, axis=0).dtype is dtype
    assert TWO.gather(value, axis=0).tolist() == [1, 0, 1]


def test_sizes_along_the_axis_may_differ_and_be_zero() -> None:
    assert TWO.gather(per_replica(TWO, [[1.0, 2.0], []]), axis=0).tolist() == [1, 2]
    assert TWO.gather(per_replica(TWO, [[[1.0], [2.0]], [[3.0, 4.0], [5.0, 6.0]]]), axis=1).tolist() == [
        [1, 3, 4],
        [2, 5, 6],
    ]


GATHER_ERRORS: dict[str, tuple[list[Any], Any, str]] = {
    "another size": (
        [[[1.0, 2.0]], [[1.0]]],
        0,
        NO_CAT.format(0) + r"\(1, 2\) torch\.float32 and \(1, 1\) torch\.float32\.",
    ),
    "another rank": ([[1.0], [[1.0]]], 0, NO_CAT.format(0)),
    "another dtype": ([[1.0], [1]], 0, NO_CAT.format(0) + r"\(1,\) torch\.float32 and \(1,\) torch\.int64\."),
    "scalars": ([1.0, 2.0], 0, r"^Scalars cannot be gathered: they have no axis\."),
    "no such axis": ([[1.0], [2.0]], 1, r"^There is no axis 1 to gather along: the values have 1 dimensions?\."),
    "no such negative axis": ([[1.0], [2.0]], -2, r"^There is no axis -2 to gather along: "),
}


@pytest.mark.parametrize("case", GATHER_ERRORS)
def test_what_does_not_fit_is_not_gathered(case: str) -> None:
    components, axis, sentence = GATHER_ERRORS[case]
    with pytest.raises(ValueError, match=sentence):
        TWO.gather(per_replica(TWO, components), axis=axis)


@pytest.mark.parametrize("case", GATHER_ERRORS)
def test_what_does_not_fit_is_not_gathered_in_the_replicas(case: str) -> None:
    components, axis, sentence = GATHER_ERRORS[case]
    with pytest.raises(ValueError, match=sentence):
        in_replicas(TWO, lambda x: context().all_gather(x, axis), components)


def test_a_gather_axis_may_be_a_tensor() -> None:
    assert TWO.gather(per_replica(TWO, [[1.0], [2.0]]), axis=torch.tensor(0)).tolist() == [1, 2]


@pytest.mark.parametrize("axis", [0.5, "0", (0,)], ids=shown)
def test_a_gather_axis_is_an_integer(axis: Any) -> None:
    with pytest.raises(TypeError, match=r"^The axis to gather along is an integer; got "):
        TWO.gather(per_replica(TWO, [[1.0], [2.0]]), axis=axis)


def test_a_gather_needs_an_axis() -> None:
    with pytest.raises(ValueError, match=r"^The axis to gather along is an integer; got None"):
        TWO.gather(per_replica(TWO, [[1.0], [2.0]]), axis=None)


def test_a_plain_value_is_gathered_as_it_is(strategy: Strategy) -> None:
    for plain in (torch.ones(2), 3, None, "text"):
        assert strategy.gather(plain, axis=0) is plain


@pytest.mark.parametrize("topology", SINGLE)
def test_a_single_replica_gathers_along_any_axis_what_it_has(topology: str) -> None:
    value = torch.ones(2)
    assert TOPOLOGIES[topology]().gather(value, axis=17) is value


@pytest.mark.parametrize("topology", SINGLE)
def test_a_single_replica_refuses_a_scalar_as_several_do(topology: str) -> None:
    with pytest.raises(ValueError, match=r"^Scalars cannot be gathered: they have no axis\."):
        TOPOLOGIES[topology]().gather(torch.tensor(1.0), axis=0)


def test_a_batch_that_was_dealt_is_gathered_whole(several: Strategy) -> None:
    rows = torch.arange(10).reshape(5, 2)
    assert torch.equal(several.gather(dealt(several, rows), axis=0).cpu(), rows)


# Against torch on everything at once

SHAPES = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@quickly
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), st.integers(1, 3), st.data())
def test_reducing_rows_is_reducing_all_rows_at_once(rows: list[int], columns: int, data: st.DataObject) -> None:
    strategy = STRATEGIES[len(rows)]
    whole = torch.randn(sum(rows), columns, dtype=torch.float64)
    value = per_replica(strategy, list(whole.split(rows)))
    axis = data.draw(st.sampled_from([0, -2]))
    close(strategy.reduce("sum", value, axis=axis), whole.sum(0))
    close(strategy.reduce("mean", value, axis=axis), whole.mean(0))
    close(strategy.reduce("mean", value, axis=(0, 1)), whole.mean())
    assert torch.equal(strategy.gather(value, axis=axis).cpu(), whole)


@quickly
@given(st.integers(1, 4), SHAPES, st.sampled_from([torch.float64, torch.float32, torch.int64, torch.int8]))
def test_reducing_components_is_reducing_their_stack(replicas: int, shape: list[int], dtype: torch.dtype) -> None:
    strategy = STRATEGIES[replicas]
    stack = torch.randint(-9, 9, (replicas, *shape)).to(dtype)
    value = per_replica(strategy, list(stack))
    total, mean = strategy.reduce("sum", value, axis=None), strategy.reduce("mean", value, axis=None)
    assert total.dtype is dtype
    assert torch.equal(total.cpu(), stack.sum(0, dtype=dtype))
    wide = stack.to(mean.dtype)
    assert mean.dtype is (dtype if dtype.is_floating_point else torch.float32)
    close(mean, stack.sum(0, dtype=dtype).to(mean.dtype) / len(wide))


@quickly
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_gathering_is_torch_cat(replicas: int, rank: int, data: st.DataObject) -> None:
    strategy = STRATEGIES[replicas]
    axis = data.draw(st.integers(-rank, rank - 1))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    parts = []
    for _ in range(replicas):
        shape[axis] = data.draw(st.integers(0, 3))
        parts.append(torch.randn(shape))
    whole = torch.cat(parts, dim=axis)
    assert torch.equal(strategy.gather(per_replica(strategy, parts), axis=axis).cpu(), whole)
    for mine in in_replicas(strategy, lambda x: context().all_gather(x, axis), parts):
        assert torch.equal(mine.cpu(), whole)


@quickly
@given(st.integers(1, 4), SHAPES)
def test_an_all_reduce_is_a_reduction_that_every_replica_has(replicas: int, shape: list[int]) -> None:
    strategy = STRATEGIES[replicas]
    stack = torch.randn(replicas, *shape, dtype=torch.float64)
    for op, expected in (("sum", stack.sum(0)), ("mean", stack.mean(0))):
        for mine in in_replicas(strategy, lambda x, op=op: context().all_reduce(op, x), list(stack)):
            close(mine, expected)


STRATEGIES = {replicas: central(replicas) for replicas in range(1, 5)}


# ReplicaContext.all_reduce


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("Mean", 1.5), (ReduceOp.SUM, 3.0)])
def test_every_replica_gets_the_reduction(op: Any, expected: float) -> None:
    assert in_replicas(TWO, lambda x: context().all_reduce(op, x).item(), [1.0, 2.0]) == [expected] * 2


def test_every_replica_gets_a_tensor_of_its_own(several: Strategy) -> None:
    shared = torch.ones(2)
    for op in ("sum", "mean"):
        value = several.run(lambda op=op: context().all_reduce(op, shared).add_(replica_id()))
        start = several.num_replicas_in_sync if op == "sum" else 1
        assert [mine.tolist() for mine in value.values] == [
            [start + r] * 2 for r in range(several.num_replicas_in_sync)
        ]
    assert shared.tolist() == [1, 1]


def test_one_replica_gets_a_tensor_of_its_own_too(strategy: Strategy) -> None:
    shared = torch.ones(2)
    strategy.run(lambda: context().all_reduce("sum", shared).add_(1))
    strategy.run(lambda: context().all_reduce("mean", shared).add_(1))
    strategy.run(lambda: context().all_gather(shared, axis=0).add_(1))
    assert shared.tolist() == [1, 1]


def test_a_tensor_that_all_replicas_share_counts_once_for_each(several: Strategy) -> None:
    shared = torch.tensor(4.0)
    value = several.run(lambda: context().all_reduce("sum", shared))
    assert [mine.item() for mine in value.values] == [4 * several.num_replicas_in_sync] * several.num_replicas_in_sync


def test_containers_are_all_reduced_leaf_by_leaf(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync

    def step() -> None:
        r = float(replica_id())
        tree = {"a": torch.tensor([r, 1.0]), "b": [(torch.tensor(r),), Pair(r, torch.ones(2, 2))]}
        total = context().all_reduce("sum", tree)
        assert type(total["b"][1]) is Pair
        assert total["a"].tolist() == [n * (n - 1) / 2, n]
        assert total["b"][0][0].item() == float(total["b"][1].first) == n * (n - 1) / 2
        assert total["b"][1].second.tolist() == [[n, n], [n, n]]
        assert tree["a"].tolist() == [r, 1.0]

    strategy.run(step)


@pytest.mark.parametrize("empty", [[], {}, ()], ids=shown)
def test_an_empty_container_is_all_reduced_to_itself(kind: Strategy, empty: Any) -> None:
    assert kind.run(lambda: context().all_reduce("sum", empty)) == empty
    assert kind.run(lambda: context().all_gather(empty, axis=0)) == empty


def test_numbers_are_all_reduced_in_every_strategy(strategy: Strategy) -> None:
    n = strategy.num_replicas_in_sync
    for mine in strategy.experimental_local_results(
        strategy.run(lambda: context().all_reduce("sum", replica_id() + 0.5))
    ):
        assert isinstance(mine, torch.Tensor)
        assert mine.item() == n * (n - 1) / 2 + n * 0.5


def test_an_all_reduce_of_integers(several: Strategy) -> None:
    def step() -> Any:
        mine = torch.tensor([replica_id(), 1], dtype=torch.int32)
        return context().all_reduce("sum", mine), context().all_reduce("mean", mine)

    n = several.num_replicas_in_sync
    for total, mean in several.experimental_local_results(several.run(step)):
        assert total.dtype is torch.int32
        assert total.tolist() == [n * (n - 1) // 2, n]
        assert mean.dtype is torch.float32
        assert mean.tolist() == [(n - 1) / 2, 1]


def test_the_dtype_of_a_mean_does_not_depend_on_who_is_present() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return context().all_reduce("mean", torch.tensor([1, 2]))

    full = TWO.run(step, args=(dealt(TWO, torch.ones(2)),))
    partial = TWO.run(step, args=(dealt(TWO, torch.ones(1)),))
    assert [mine.dtype for mine in full.values] == [torch.float32] * 2
    assert [mine.dtype for mine in partial.values] == [torch.float32]


def test_one_replica_reduces_to_what_it_has(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync == 1:
        for op in ("sum", "mean"):
            reduced = strategy.run(lambda op=op: context().all_reduce(op, torch.tensor([1, 2])))
            assert reduced.dtype is torch.int64
            assert reduced.tolist() == [1, 2]


def test_uneven_shapes_are_not_all_reduced(several: Strategy) -> None:
    with pytest.raises(ValueError, match=NO_SUM + r"\(1,\) torch\.float32 and \(2,\) torch\.float32"):
        several.run(lambda: context().all_reduce("sum", torch.ones(replica_id() + 1)))


ALL_REDUCE_ERRORS: dict[str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "an unknown reduction": (
        lambda: context().all_reduce("MAX", 1.0),
        ValueError,
        r"^'MAX' is not one of the reductions 'SUM', 'MEAN'\.",
    ),
    "no reduction": (lambda: context().all_reduce(None, 1.0), (TypeError, ValueError), r"^Expected reduce_op to be "),
    "text": (lambda: context().all_reduce("sum", "text"), TypeError, r"^Only tensors, arrays and numbers can be "),
    "options": (lambda: context().all_reduce("sum", 1.0, options=3), ValueError, r"^all_reduce\(options=3\): "),
    "options of a gather": (
        lambda: context().all_gather(torch.ones(1), 0, options=3),
        ValueError,
        r"^all_gather\(options=3\): ",
    ),
    "a scalar": (lambda: context().all_gather(1.0, 0), ValueError, r"^Scalars cannot be gathered: they have no axis\."),
    "no axis": (lambda: context().all_gather(torch.ones(1), 1), ValueError, r"^There is no axis 1 to gather along: "),
}


@pytest.mark.parametrize("case", ALL_REDUCE_ERRORS)
def test_what_cannot_be_reduced_or_gathered_in_a_replica_is_refused(kind: Strategy, case: str) -> None:
    call, error, sentence = ALL_REDUCE_ERRORS[case]
    with pytest.raises(error, match=sentence):
        kind.run(call)


def test_none_is_not_all_reduced() -> None:
    with pytest.raises(
        ValueError, match=r"^Only tensors, arrays and numbers can be combined across replicas; got None"
    ):
        TWO.run(lambda: context().all_reduce("sum", None))


def test_containers_meet_key_by_key_in_whatever_order_the_keys_are(several: Strategy) -> None:
    n = several.num_replicas_in_sync

    def step() -> None:
        items = [("a", torch.tensor([1.0])), ("b", torch.tensor([10.0]))]
        tree = dict(reversed(items) if replica_id() else items)
        total = context().all_reduce("sum", tree)
        assert total["a"].tolist() == [n]
        assert total["b"].tolist() == [10 * n]
        gathered = context().all_gather(tree, axis=0)
        assert gathered["a"].tolist() == [1.0] * n
        assert gathered["b"].tolist() == [10.0] * n

    several.run(step)


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "keys": ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
    "depths": ([torch.ones(1)], torch.ones(1)),
    "lengths": ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
}


@pytest.mark.parametrize("case", STRUCTURES)
@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_containers_that_differ_do_not_meet(method: str, case: str) -> None:
    def step() -> None:
        tree = STRUCTURES[case][replica_id()]
        if method == "all_reduce":
            context().all_reduce("sum", tree)
        else:
            context().all_gather(tree, axis=0)

    with pytest.raises(ValueError, match=r"^Replicas 0 and 1 .*of different structure"):
        TWO.run(step)


def test_a_collective_that_not_every_replica_comes_to_is_an_error(several: Strategy) -> None:
    def step(who: int) -> None:
        if replica_id() == who:
            context().all_reduce("sum", torch.ones(1))

    for who in (0, 1):
        with pytest.raises(RuntimeError, match=rf"^The replicas synchronized .*replica {who} is at all_reduce"):
            several.run(step, args=(who,))


# ReplicaContext.all_gather


def test_every_replica_gets_all_values_in_replica_order(several: Strategy) -> None:
    n = several.num_replicas_in_sync

    def step() -> None:
        r = replica_id()
        gathered = context().all_gather({"x": torch.full((1, 2), r), "y": [torch.arange(r)]}, axis=0)
        assert gathered["x"].tolist() == [[i, i] for i in range(n)]
        assert gathered["y"][0].tolist() == [k for i in range(n) for k in range(i)]
        assert context().all_gather(torch.full((2, 1), r), axis=-1).tolist() == [list(range(n))] * 2

    several.run(step)


def test_one_replica_gathers_what_it_has() -> None:
    for topology in (*SINGLE, "central_1", "copies_1"):
        gathered = TOPOLOGIES[topology]().run(lambda: context().all_gather(torch.tensor([[1.0, 2.0]]), axis=1))
        assert gathered.tolist() == [[1, 2]]


# Gradients through collectives, of each replica's own input


def leaf(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def gradients(
    loss_of: Callable[[Any, Any], torch.Tensor],
    inputs: Sequence[Any],
    options: RunOptions | None = None,
    strategy: Strategy = TWO,
) -> list[Any]:
    """In each replica, the gradient of `loss_of(x, coefficient)` by its own x."""

    def step() -> torch.Tensor:
        x = leaf(inputs[replica_id()])
        (gradient,) = torch.autograd.grad(loss_of(x, replica_id()), x)
        return gradient

    return [g.tolist() for g in strategy.experimental_local_results(strategy.run(step, options=options))]


@pytest.mark.parametrize(("op", "expected"), [("sum", [4.0, 4.0]), ("mean", [2.0, 2.0])])
def test_the_gradient_of_an_all_reduce_is_an_all_reduce_of_gradients(op: str, expected: list[float]) -> None:
    coefficients = [1.0, 3.0]
    assert gradients(lambda x, r: coefficients[r] * context().all_reduce(op, x), [1.0, 2.0]) == expected


@pytest.mark.parametrize(("op", "expected"), [("sum", [4.0, 8.0]), ("mean", [2.0, 4.0])])
def test_gradients_go_on_below_an_all_reduce(op: str, expected: list[float]) -> None:
    assert gradients(lambda x, r: context().all_reduce(op, x * x), [1.0, 2.0]) == expected


def test_the_gradient_of_an_all_gather_is_the_replicas_own_slice() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        return context().all_gather(x, axis=0).square().sum()

    assert gradients(loss_of, [[1.0], [2.0, 3.0]]) == [[4.0], [8.0, 12.0]]


def test_the_gradient_of_an_all_gather_along_another_axis() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        gathered = context().all_gather(x, axis=-1)
        return (gathered * torch.arange(3.0)).sum() * (r + 1)

    assert gradients(loss_of, [[[1.0], [1.0]], [[2.0, 3.0], [2.0, 3.0]]]) == [[[0.0]] * 2, [[3.0, 6.0]] * 2]


def test_with_one_replica_gradients_are_ordinary() -> None:
    for topology in (*SINGLE, "central_1", "copies_1"):
        strategy = TOPOLOGIES[topology]()
        for op in ("sum", "mean"):
            assert gradients(lambda x, r, op=op: context().all_reduce(op, x * x), [3.0], strategy=strategy) == [6.0]
        assert gradients(lambda x, r: context().all_gather(x, 0).square().sum(), [[3.0]], strategy=strategy) == [[6.0]]


def test_gradients_of_integers_among_the_values_are_not_asked_for() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        total = context().all_reduce("sum", {"n": torch.tensor([1, 2]), "x": x})
        assert total["n"].dtype is torch.int64
        assert not total["n"].requires_grad
        return total["x"]

    assert gradients(loss_of, [1.0, 2.0]) == [2.0, 2.0]


def test_a_value_that_the_loss_does_not_use_has_a_gradient_of_zero() -> None:
    def loss_of(x: torch.Tensor, r: int) -> torch.Tensor:
        used, _ = context().all_reduce("sum", (x, x * 100))
        return used

    assert gradients(loss_of, [1.0, 2.0]) == [2.0, 2.0]


def test_the_gradient_reaches_the_one_replica_whose_input_requires_it(several: Strategy) -> None:
    last = several.num_replicas_in_sync - 1

    def step() -> Any:
        x = leaf([1.0, 2.0])
        total = context().all_reduce("sum", x if replica_id() == last else x.detach())
        assert total.requires_grad
        (total.sum() * (replica_id() + 1)).backward()
        return x.grad if x.grad is not None else "none"

    *others, own = several.experimental_local_results(several.run(step))
    n = several.num_replicas_in_sync
    assert own.tolist() == [n * (n + 1) / 2] * 2
    assert others == ["none"] * last


def test_where_no_input_requires_grad_no_output_does(several: Strategy) -> None:
    assert several.run(lambda: context().all_reduce("sum", torch.ones(1)).requires_grad) is False
    assert several.run(lambda: context().all_gather(torch.ones(1), axis=0).requires_grad) is False


def test_without_grad_mode_no_output_requires_grad(several: Strategy) -> None:
    def step() -> bool:
        with torch.no_grad():
            return context().all_reduce("sum", leaf(1.0)).requires_grad

    assert several.run(step) is False
    with torch.no_grad():
        assert several.run(lambda: context().all_reduce("sum", leaf(1.0)).requires_grad) is False


def test_a_backward_that_not_every_replica_runs_is_an_error() -> None:
    def step() -> None:
        total = context().all_reduce("sum", leaf(1.0))
        if replica_id() == 0:
            total.backward()

    with pytest.raises(
        RuntimeError, match=r"^The replicas synchronized a different number of times,? or in a different order: "
    ):
        TWO.run(step)


# The gradient of the whole step: the sum over replicas of share times loss, in one graph

SHARES: dict[str, tuple[RunOptions, list[float]]] = {
    "equal": (RunOptions(), [0.5, 0.5]),
    "3:1": (RunOptions(examples=[3, 1]), [0.75, 0.25]),
    "1:4": (RunOptions(examples=[1, 4]), [0.2, 0.8]),
    "SUM": (RunOptions(gradient_reduction="sum"), [1.0, 1.0]),
    "SUM of 3:1": (RunOptions(gradient_reduction="sum", examples=[3, 1]), [1.0, 1.0]),
}
COLLECTIVES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[list[torch.Tensor]], torch.Tensor]]] = {
    "sum": (lambda h: context().all_reduce("sum", h), lambda hs: hs[0] + hs[1]),
    "mean": (lambda h: context().all_reduce("mean", h), lambda hs: (hs[0] + hs[1]) / 2),
    "gather": (lambda h: context().all_gather(h, axis=0), torch.cat),
}
INPUTS = [torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[3.0, -1.0]], dtype=torch.float64)]
COEFFICIENTS = [1.5, -0.7]


def inputs_of(model: torch.nn.Module, r: int) -> torch.Tensor:
    """The rows of replica r, where the model is."""
    return INPUTS[r].to(model.weight.device)


def local_loss(model: torch.nn.Module, r: int, hidden: torch.Tensor) -> torch.Tensor:
    """The loss of replica r: its own rows, and what all replicas know."""
    return COEFFICIENTS[r] * (hidden**2).sum() + (model(inputs_of(model, r)) * COEFFICIENTS[r]).sum()


def new_model(strategy: Strategy) -> torch.nn.Linear:
    torch.manual_seed(1)
    with strategy.scope():
        return torch.nn.Linear(2, 1, dtype=torch.float64)


def in_one_graph(
    weights: Sequence[float], combine: Callable[[list[torch.Tensor]], torch.Tensor], learns: Any
) -> list[Any]:
    """The gradients by the parameters of sum_i w_i L_i, by plain autograd."""
    model = new_model(DEFAULT)
    hiddens = [torch.tanh(model(x)) for x in INPUTS]
    hidden = combine([h if r in learns else h.detach() for r, h in enumerate(hiddens)])
    loss = sum(w * local_loss(model, r, hidden) for r, w in enumerate(weights))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def check_against_one_graph(strategy: Strategy, shares: str, collective: str, learns: Sequence[int] = (0, 1)) -> None:
    options, weights = SHARES[shares]
    meet, combine = COLLECTIVES[collective]
    model = new_model(strategy)

    def step() -> None:
        r = replica_id()
        hidden = torch.tanh(model(inputs_of(model, r)))
        local_loss(model, r, meet(hidden if r in learns else hidden.detach())).backward()

    strategy.run(step, options=options)
    expected = in_one_graph(weights, combine, learns)
    close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learns", [(0, 1), (0,), (1,)], ids=["both", "replica 0", "replica 1"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shares", SHARES)
def test_the_gradient_of_a_step_with_a_collective_is_that_of_one_graph(
    shares: str, collective: str, learns: Sequence[int]
) -> None:
    check_against_one_graph(central(2), shares, collective, learns)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_so_it_is_where_parameters_are_copied_to_the_replicas(collective: str) -> None:
    check_against_one_graph(central_with_copies(2), "3:1", collective)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_so_it_is_where_the_strategy_was_made_to_sum(collective: str) -> None:
    strategy = central(2, gradient_reduction="sum")
    model = new_model(strategy)
    meet, combine = COLLECTIVES[collective]
    hidden = lambda: meet(torch.tanh(model(inputs_of(model, replica_id()))))  # noqa: E731
    strategy.run(lambda: local_loss(model, replica_id(), hidden()).backward())
    expected = in_one_graph([1.0, 1.0], combine, (0, 1))
    close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-12)


def test_the_rows_that_were_dealt_are_the_shares() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)  # two of them for replica 0, one for replica 1
    coefficients = torch.tensor([[1.0], [1.0], [5.0]], dtype=torch.float64)

    def loss_of(model: torch.nn.Module, x: torch.Tensor, c: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return (c * (model(x) - total / 3) ** 2).mean()

    with TWO.scope():
        model = torch.nn.Linear(1, 1, dtype=torch.float64)

    def step(x: torch.Tensor, c: torch.Tensor) -> None:
        loss_of(model, x, c, context().all_reduce("sum", model(x).sum())).backward()

    TWO.run(step, args=(dealt(TWO, rows), dealt(TWO, coefficients)))
    rows, coefficients = rows.to(model.weight.device), coefficients.to(model.weight.device)
    total = model(rows).sum()
    expected = torch.autograd.grad(loss_of(model, rows, coefficients, total), list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), rtol=1e-12, atol=1e-12)


def test_replicas_that_sit_out_have_no_part_in_the_gradient() -> None:
    strategy = central(3)
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    strategy.run(
        lambda x: (context().all_reduce("mean", model(x).mean()) ** 2).backward(),
        args=(dealt(strategy, rows),),
    )
    expected = torch.autograd.grad(model(rows.to(model.weight.device)).mean() ** 2, model.weight)
    torch.testing.assert_close([model.weight.grad], list(expected), rtol=1e-12, atol=1e-12)


def test_a_replica_of_no_examples_has_no_gradient_even_if_it_is_nan() -> None:
    with TWO.scope():
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def step() -> None:
        y = model(torch.ones(1, 1, dtype=torch.float64))
        total = context().all_reduce("sum", y.sum().detach() if replica_id() else y.sum())
        (total * (float("nan") if replica_id() else 1.0)).backward()

    TWO.run(step, options=RunOptions(examples=[2, 0]))
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1


@pytest.mark.parametrize("shares", ["equal", "3:1", "SUM"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gradients_of_gradients_are_those_of_one_graph(shares: str, collective: str) -> None:
    # In replica i, a gradient is that of the whole step over the share w_i: also one that a loss is made of.
    options, weights = SHARES[shares]
    meet, combine = COLLECTIVES[collective]
    values = [[1.0, -0.5], [2.0, 0.3]]

    def step() -> Any:
        x, c = leaf(values[replica_id()]), COEFFICIENTS[replica_id()]
        (first,) = torch.autograd.grad((c * meet(x**2) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum() + first.sum(), x)
        return first.detach(), second

    xs = [leaf(value) for value in values]
    hidden = combine([x**2 for x in xs])
    loss = sum(w * (c * hidden**2).sum() for w, c in zip(weights, COEFFICIENTS, strict=True))
    first = [g / w for g, w in zip(torch.autograd.grad(loss, xs, create_graph=True), weights, strict=True)]
    penalty = sum(w * ((g**2).sum() + g.sum()) for w, g in zip(weights, first, strict=True))
    second = [g / w for g, w in zip(torch.autograd.grad(penalty, xs), weights, strict=True)]
    results = TWO.experimental_local_results(TWO.run(step, options=options))
    for r, (mine_first, mine_second) in enumerate(results):
        close(mine_first, first[r].detach(), rtol=1e-12, atol=1e-12)
        close(mine_second, second[r], rtol=1e-12, atol=1e-12)


def test_a_gradient_penalty_trains_the_parameters_as_in_one_graph() -> None:
    model = new_model(TWO)

    def loss_of(model: torch.nn.Module, x: torch.Tensor, meet: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        return meet((slope**2).sum()) ** 2

    def step() -> None:
        loss_of(model, inputs_of(model, replica_id()), lambda penalty: context().all_reduce("sum", penalty)).backward()

    TWO.run(step, options=RunOptions(examples=[3, 1]))
    plain = new_model(DEFAULT)
    penalties = [loss_of(plain, x, lambda penalty: penalty).sqrt() for x in INPUTS]
    expected = torch.autograd.grad(sum(penalties) ** 2, list(plain.parameters()))
    close([p.grad for p in model.parameters()], list(expected), rtol=1e-9, atol=1e-12)


# Gradients through reduce and gather, outside of the replicas


def test_gradients_flow_through_what_run_returned() -> None:
    xs = [leaf([1.0, 2.0]), leaf([3.0])]
    value = TWO.run(lambda: xs[replica_id()] ** 2)
    TWO.reduce("mean", value, axis=0).backward()
    assert [x.grad.tolist() for x in xs] == [[2 / 3, 4 / 3], [2.0]]
    gathered = TWO.gather(TWO.run(lambda: xs[replica_id()] ** 2), axis=0)
    grads = torch.autograd.grad((gathered.cpu() * torch.tensor([1.0, 10.0, 100.0])).sum(), xs)
    assert [g.tolist() for g in grads] == [[2, 40], [600]]


def test_a_backward_after_the_run_reaches_the_users_parameters(strategy: Strategy) -> None:
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    losses = strategy.run(lambda: model(torch.full((2, 1), replica_id() + 1.0)).squeeze(1))
    strategy.reduce("mean", losses, axis=0).backward()
    n = strategy.num_replicas_in_sync
    close(model.weight.grad, torch.tensor([[(n + 1) / 2]]))


def test_what_a_replica_gets_is_on_the_device_of_the_replica(strategy):
    """A lone replica on an accelerator got it on the CPU: a loss, say, and then a gradient on another device."""

    def step(x: torch.Tensor) -> list[torch.device]:
        here = torchstrategy.get_replica_context()
        x = x.clone().requires_grad_()
        parts = [here.all_reduce("sum", x.sum()), here.all_reduce("mean", x.sum()), here.all_gather(x, axis=0)]
        parts += [torchstrategy.nn.compute_average_loss(x)]
        sum(part.sum() for part in parts).backward()
        return [part.device == x.device for part in (*parts, x.grad)]

    for batch in strategy.experimental_distribute_dataset([torch.ones(8)]):
        assert all(all(strategy.experimental_local_results(same)) for same in strategy.run(step, args=(batch,)))
