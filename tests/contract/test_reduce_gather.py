"""How values become one outside of the replicas: reduce and gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components import NO_SUM, SINGLE, TWO, Pair, dealt, in_replicas, per_replica
from conditions import for_changes
from problems import close, context, replica_id, shown
from topologies import TOPOLOGIES, central
from torchstrategy import OneDeviceStrategy, ReduceOp, Strategy

ONE = OneDeviceStrategy("cpu")
NO_CAT = r"^The replicas' values cannot be gathered along axis {}: "
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# Strategy.reduce over the replicas


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", [4.0, 6.0, 8.0, 10.0]), ("mean", [2.0, 3.0, 4.0, 5.0])]
)
def test_components_are_reduced_element_by_element(
    op: str, expected: list[float]
) -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    assert TWO.reduce(op, value, axis=None).tolist() == expected


@pytest.mark.parametrize(("op", "expected"), [("sum", 28.0), ("mean", 3.5)])
def test_components_are_reduced_along_an_axis_too(op: str, expected: float) -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    assert TWO.reduce(op, value, axis=0).item() == expected


@pytest.mark.parametrize("name", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_a_reduction_may_be_named_in_any_case(kind: Strategy, name: Any) -> None:
    assert (
        kind.reduce(name, kind.run(lambda: torch.ones(2) * 1), axis=0)
        == 2 * kind.num_replicas_in_sync
    )


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("junk", ["max", "", "sum "])
def test_an_unknown_reduction_is_refused(
    kind: Strategy, junk: str, axis: int | None
) -> None:
    with pytest.raises(
        ValueError, match=rf"^'{junk}' is not one of the reductions 'SUM', 'MEAN'\."
    ):
        kind.reduce(junk, torch.ones(2), axis=axis)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("junk", [None, 0, sum, torch.ones(1)], ids=shown)
def test_what_is_no_reduction_is_refused(
    kind: Strategy, junk: Any, axis: int | None
) -> None:
    with pytest.raises(
        TypeError,
        match=(
            r"^Expected reduce_op to be a torchstrategy\.ReduceOp or its name, 'SUM' "
            r"or 'M"
        ),
    ):
        kind.reduce(junk, torch.ones(2), axis=axis)


def test_the_axis_has_to_be_said(kind: Strategy) -> None:
    with pytest.raises(TypeError, match=r"axis"):
        kind.reduce("sum", torch.ones(2))
    with pytest.raises(TypeError, match=r"axis"):
        kind.gather(torch.ones(2))


@pytest.mark.parametrize(
    "components",
    [[[1.0, 2.0], [1.0]], [[[1.0, 2.0]], [1.0, 2.0]], [[1.0], 1.0]],
    ids=shown,
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_components_of_different_shapes_are_not_added(
    op: str, components: list[Any]
) -> None:
    with pytest.raises(ValueError, match=NO_SUM):
        TWO.reduce(op, per_replica(TWO, components), axis=None)


def test_the_error_shows_the_shapes_and_dtypes() -> None:
    value = per_replica(TWO, [[1.0, 2.0], [1]])
    with pytest.raises(
        ValueError, match=NO_SUM + r"\(2,\) torch\.float32 and \(1,\) torch\.int64\."
    ):
        TWO.reduce("sum", value, axis=None)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("components", [["a", "b"], [None, 1.0], [{1}, {2}]], ids=shown)
def test_what_has_no_numbers_is_not_added(
    components: list[Any], axis: int | None
) -> None:
    with pytest.raises(
        (TypeError, ValueError),
        match=r"^Only tensors, arrays and numbers can be combined across replicas",
    ):
        TWO.reduce("sum", per_replica(TWO, components), axis=axis)


def test_numbers_and_arrays_that_run_returned_are_reduced() -> None:
    assert (
        TWO.reduce("sum", TWO.run(lambda: replica_id() + 1000), axis=None).item()
        == 2001
    )
    assert (
        TWO.reduce("mean", TWO.run(lambda: replica_id() + 0.5), axis=None).item() == 1
    )
    assert TWO.reduce(
        "sum", TWO.run(lambda: np.array([1.0, replica_id()])), axis=None
    ).tolist() == [2, 1]


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64],
)
def test_a_sum_keeps_the_dtype(dtype: torch.dtype) -> None:
    value = per_replica(
        TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 4], dtype=dtype)]
    )
    assert TWO.reduce("sum", value, axis=None).dtype is dtype
    assert TWO.reduce("sum", value, axis=0).dtype is dtype
    assert TWO.reduce("sum", value, axis=0).item() == 10


def test_a_sum_wraps_around_as_its_dtype_does() -> None:
    value = per_replica(
        TWO,
        [
            torch.tensor([200, 1], dtype=torch.uint8),
            torch.tensor([100, 1], dtype=torch.uint8),
        ],
    )
    assert TWO.reduce("sum", value, axis=None).tolist() == [44, 2]
    assert TWO.reduce("sum", value, axis=0).item() == 46


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
)
@pytest.mark.parametrize("axis", [None, 0])
def test_the_mean_of_integers_is_of_the_default_dtype(
    dtype: torch.dtype, axis: int | None
) -> None:
    value = per_replica(
        TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([2, 5], dtype=dtype)]
    )
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


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("axis", [None, 0])
def test_the_mean_of_other_numbers_keeps_the_dtype(
    dtype: torch.dtype, axis: int | None
) -> None:
    value = per_replica(
        TWO, [torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 4], dtype=dtype)]
    )
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


def test_the_reduced_value_of_one_replica_is_a_new_tensor() -> None:
    """Only this replica was present."""
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
def test_the_mean_over_uneven_rows_is_the_mean_over_all_rows(
    op: str, expected: float
) -> None:
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
def test_an_axis_that_is_not_there_is_refused(
    kind: Strategy, op: str, axis: Any
) -> None:
    value = kind.run(lambda: torch.ones(3) * 1)
    missing = 1 if axis == (0, 1) else axis
    with pytest.raises(
        ValueError,
        match=(
            rf"^There is no axis {missing} to reduce along: a value has the shape "
            r"\(3,\)\."
        ),
    ):
        kind.reduce(op, value, axis=axis)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_scalars_have_no_axis_to_reduce_along(kind: Strategy, op: str) -> None:
    told = (
        r"^There is no axis 0 to reduce along: a value has the shape \(\)\. Each .* "
        r"axis=None, weights=batch\), "
    )
    with pytest.raises(ValueError, match=told):
        kind.reduce(op, kind.run(lambda: torch.tensor(1.0)), axis=0)


@pytest.mark.parametrize("axis", [0.0, "0", [0], (0, 0.5)], ids=shown)
def test_an_axis_is_an_integer(kind: Strategy, axis: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"^The axis to reduce along is an integer or a tuple of them; got ",
    ):
        kind.reduce("sum", kind.run(lambda: torch.ones(2)), axis=axis)


@pytest.mark.parametrize("axis", [(0, 0), (0, -1)], ids=shown)
def test_an_axis_cannot_be_reduced_along_twice(kind: Strategy, axis: Any) -> None:
    with pytest.raises(ValueError, match=r"axis"):
        kind.reduce("sum", kind.run(lambda: torch.ones(2)), axis=axis)


def test_reducing_along_no_axis_at_all_is_reducing_over_the_replicas(
    several: Strategy,
) -> None:
    value = several.run(lambda: torch.tensor([1.0, 2.0]) * replica_id())
    for op in ("sum", "mean"):
        assert torch.equal(
            several.reduce(op, value, axis=()), several.reduce(op, value, axis=None)
        )


def test_booleans_are_counted_along_an_axis() -> None:
    value = per_replica(TWO, [torch.tensor([True, False, True]), torch.tensor([True])])
    assert TWO.reduce("sum", value, axis=0).item() == 3
    assert TWO.reduce("mean", value, axis=0).item() == 0.75


# Strategy.reduce of what is not distributed


def test_a_plain_value_is_not_summed_over_several_replicas(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    for plain in (torch.ones(2), torch.tensor(0.5), 1.0, "text", None):
        sentence = (
            rf"^A value that is not distributed, .*, cannot be summed over {n} "
            r"replicas: "
        )
        with pytest.raises(ValueError, match=sentence):
            several.reduce("sum", plain, axis=None)


def test_the_mean_of_a_plain_value_is_itself(strategy: Strategy) -> None:
    for plain in (torch.ones(2), 3, None, "text", np.ones(2)):
        assert strategy.reduce("mean", plain, axis=None) is plain


def test_a_plain_zero_stays_zero_in_any_reduction(strategy: Strategy) -> None:
    for op in ("sum", "mean"):
        for zero in (0, 0.0):
            assert strategy.reduce(op, zero, axis=None) == 0


def test_along_an_axis_a_plain_value_counts_as_the_same_in_every_replica(
    strategy: Strategy,
) -> None:
    for plain in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])):
        assert (
            strategy.reduce("sum", plain, axis=0).item()
            == 3 * strategy.num_replicas_in_sync
        )
        assert strategy.reduce("mean", plain, axis=0).item() == 1.5


def test_a_reduction_that_is_reduced_again_counts_again() -> None:
    value = per_replica(TWO, [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    once = TWO.reduce("sum", value, axis=None)
    assert TWO.reduce("sum", once, axis=0).item() == 56
    assert TWO.reduce("sum", value, axis=0).item() == 28


@pytest.mark.parametrize("topology", SINGLE)
@pytest.mark.parametrize("value", [torch.ones(2), 3, None, "text", object()], ids=shown)
def test_a_single_replica_reduces_anything_to_itself(
    topology: str, value: object
) -> None:
    strategy = TOPOLOGIES[topology]()
    for op in ("sum", "mean"):
        assert strategy.reduce(op, value, axis=None) is value


@pytest.mark.parametrize("topology", SINGLE)
def test_a_single_replica_reduces_along_an_axis(topology: str) -> None:
    strategy = TOPOLOGIES[topology]()
    assert strategy.reduce("sum", torch.arange(10), axis=0).item() == 45
    assert strategy.reduce("mean", torch.arange(10), axis=0).item() == 4.5
    assert (
        strategy.reduce("sum", torch.arange(4.0).reshape(2, 2), axis=(0, 1)).item() == 6
    )


@pytest.mark.parametrize("topology", ["central_1", "copies_1"])
def test_the_sum_over_one_replica_is_a_tensor_of_its_own(topology: str) -> None:
    strategy, value = TOPOLOGIES[topology](), torch.ones(2)
    reduced = strategy.reduce("sum", value, axis=None)
    assert torch.equal(reduced, value)
    assert reduced.data_ptr() != value.data_ptr()
    assert strategy.reduce("sum", 3, axis=None).item() == 3


# Nested values: where TensorFlow refuses them or leaves them as they are


def test_containers_are_reduced_leaf_by_leaf(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = several.run(
        lambda: {
            "a": torch.ones(2) * 1,
            "b": [(torch.tensor(float(replica_id())),), Pair(2.5, None)],
        }
    )
    mean = several.reduce("mean", value, axis=None)
    assert type(mean) is dict
    assert type(mean["b"][1]) is Pair
    assert mean["a"].tolist() == [1, 1]
    assert mean["b"][0][0].item() == (n - 1) / 2
    assert mean["b"][1] == Pair(2.5, None)
    assert several.reduce("sum", {"a": value["a"]}, axis=0)["a"].item() == 2 * n


def test_containers_are_gathered_leaf_by_leaf(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = several.run(
        lambda: {
            "a": torch.ones(1) * replica_id(),
            "b": Pair(torch.ones(2, 1) * 1, "text"),
        }
    )
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
    with pytest.raises(
        ValueError, match=r"^value\[0\]: There is no axis 0 to reduce along: "
    ):
        several.reduce("mean", [1.0, 2.0], axis=0)
    assert several.reduce("mean", [1.0, 2.0], axis=None) == [1.0, 2.0]
    with pytest.raises(
        ValueError,
        match=r"^value\[0\]: A value that is not distributed, 1\.0, cannot be summed ",
    ):
        several.reduce("sum", [1.0, 2.0], axis=None)


# Strategy.gather


def test_components_are_gathered_in_replica_order(several: Strategy) -> None:
    value = several.run(lambda: torch.full((1, 2), float(replica_id())))
    n = several.num_replicas_in_sync
    assert several.gather(value, axis=0).tolist() == [[r, r] for r in range(n)]
    assert several.gather(value, axis=1).tolist() == [
        [r for r in range(n) for _ in range(2)]
    ]
    assert torch.equal(several.gather(value, axis=-1), several.gather(value, axis=1))
    assert torch.equal(several.gather(value, axis=-2), several.gather(value, axis=0))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.float16, torch.complex64]
)
def test_anything_can_be_gathered_and_keeps_its_dtype(dtype: torch.dtype) -> None:
    value = per_replica(
        TWO, [torch.tensor([1, 0], dtype=dtype), torch.tensor([1], dtype=dtype)]
    )
    assert TWO.gather(value, axis=0).dtype is dtype
    assert TWO.gather(value, axis=0).tolist() == [1, 0, 1]


def test_sizes_along_the_axis_may_differ_and_be_zero() -> None:
    assert TWO.gather(per_replica(TWO, [[1.0, 2.0], []]), axis=0).tolist() == [1, 2]
    assert TWO.gather(
        per_replica(TWO, [[[1.0], [2.0]], [[3.0, 4.0], [5.0, 6.0]]]), axis=1
    ).tolist() == [
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
    "another dtype": (
        [[1.0], [1]],
        0,
        NO_CAT.format(0) + r"\(1,\) torch\.float32 and \(1,\) torch\.int64\.",
    ),
    "scalars": ([1.0, 2.0], 0, r"^Scalars cannot be gathered: they have no axis\."),
    "no such axis": (
        [[1.0], [2.0]],
        1,
        r"^There is no axis 1 to gather along: the values have 1 dimensions?\.",
    ),
    "no such negative axis": (
        [[1.0], [2.0]],
        -2,
        r"^There is no axis -2 to gather along: ",
    ),
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
    assert TWO.gather(
        per_replica(TWO, [[1.0], [2.0]]), axis=torch.tensor(0)
    ).tolist() == [1, 2]


@pytest.mark.parametrize("axis", [0.5, "0", (0,)], ids=shown)
def test_a_gather_axis_is_an_integer(axis: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^The axis to gather along is an integer; got "
    ):
        TWO.gather(per_replica(TWO, [[1.0], [2.0]]), axis=axis)


def test_a_gather_needs_an_axis() -> None:
    with pytest.raises(
        ValueError, match=r"^The axis to gather along is an integer; got None"
    ):
        TWO.gather(per_replica(TWO, [[1.0], [2.0]]), axis=None)


def test_a_plain_value_is_gathered_as_it_is(strategy: Strategy) -> None:
    for plain in (torch.ones(2), 3, None, "text"):
        assert strategy.gather(plain, axis=0) is plain


@pytest.mark.parametrize("topology", SINGLE)
def test_a_single_replica_gathers_along_any_axis_what_it_has(topology: str) -> None:
    value = torch.ones(2)
    assert TOPOLOGIES[topology]().gather(value, axis=17) is value


def test_a_batch_that_was_dealt_is_gathered_whole(several: Strategy) -> None:
    rows = torch.arange(10).reshape(5, 2)
    assert torch.equal(several.gather(dealt(several, rows), axis=0).cpu(), rows)


# Against torch on everything at once


SHAPES = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@quickly
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    st.integers(1, 3),
    st.data(),
)
def test_reducing_rows_is_reducing_all_rows_at_once(
    rows: list[int], columns: int, data: st.DataObject
) -> None:
    strategy = STRATEGIES[len(rows)]
    whole = torch.randn(sum(rows), columns, dtype=torch.float64)
    value = per_replica(strategy, list(whole.split(rows)))
    axis = data.draw(st.sampled_from([0, -2]))
    close(strategy.reduce("sum", value, axis=axis), whole.sum(0))
    close(strategy.reduce("mean", value, axis=axis), whole.mean(0))
    close(strategy.reduce("mean", value, axis=(0, 1)), whole.mean())
    assert torch.equal(strategy.gather(value, axis=axis).cpu(), whole)


@quickly
@given(
    st.integers(1, 4),
    SHAPES,
    st.sampled_from([torch.float64, torch.float32, torch.int64, torch.int8]),
)
def test_reducing_components_is_reducing_their_stack(
    replicas: int, shape: list[int], dtype: torch.dtype
) -> None:
    strategy = STRATEGIES[replicas]
    stack = torch.randint(-9, 9, (replicas, *shape)).to(dtype)
    value = per_replica(strategy, list(stack))
    total, mean = (
        strategy.reduce("sum", value, axis=None),
        strategy.reduce("mean", value, axis=None),
    )
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
    assert torch.equal(
        strategy.gather(per_replica(strategy, parts), axis=axis).cpu(), whole
    )
    for mine in in_replicas(strategy, lambda x: context().all_gather(x, axis), parts):
        assert torch.equal(mine.cpu(), whole)


@for_changes
@quickly
@given(st.integers(1, 4), SHAPES)
def test_an_all_reduce_is_a_reduction_that_every_replica_has(
    replicas: int, shape: list[int]
) -> None:
    strategy = STRATEGIES[replicas]
    stack = torch.randn(replicas, *shape, dtype=torch.float64)
    for op, expected in (("sum", stack.sum(0)), ("mean", stack.mean(0))):
        for mine in in_replicas(
            strategy, lambda x, op=op: context().all_reduce(op, x), list(stack)
        ):
            close(mine, expected)


STRATEGIES = {replicas: central(replicas) for replicas in range(1, 5)}
