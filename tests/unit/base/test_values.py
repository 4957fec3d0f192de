"""Values of several replicas: put together, taken apart, printed, copied."""

from __future__ import annotations

import collections
import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from topologies import central
from torchstrategy import DistributedValues, Strategy, get_replica_context
from torchstrategy._base.distributed_values import (
    ABSENT,
    Mirrored,
    PerReplica,
    regroup,
    select,
)


class Leaf:
    """A leaf that is equal to no other, whatever it is called."""

    def __init__(self, name: object = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Leaf({self.name!r})"


class Pair(NamedTuple):
    first: Any
    second: Any


class Batch(dict):
    """A dict of the user's own class."""


def replica_id() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def dealt(strategy: Strategy, rows: torch.Tensor) -> DistributedValues:
    """A batch with these rows."""
    return next(iter(strategy.experimental_distribute_dataset([rows])))


@pytest.fixture
def per_replica() -> PerReplica:
    return PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])


# What a distributed value is


def test_what_run_returns_from_several_replicas_is_a_distributed_value(
    several: Strategy,
) -> None:
    value = several.run(lambda: torch.ones(1) * replica_id())
    assert isinstance(value, DistributedValues)
    assert type(value.values) is tuple
    assert [float(component) for component in value.values] == list(
        range(several.num_replicas_in_sync)
    )


def test_the_common_type_of_distributed_values_is_not_made() -> None:
    with pytest.raises(
        TypeError, match=r"^DistributedValues is only the common type of such values\. "
    ):
        DistributedValues([1, 2])


NOT_A_TENSOR: dict[str, tuple[type[Exception], Callable[[Any], object]]] = {
    "value + 1": (TypeError, lambda v: v + 1),
    "1 + value": (TypeError, lambda v: 1 + v),
    "value * tensor": (TypeError, lambda v: v * torch.ones(2)),
    "tensor * value": (TypeError, lambda v: torch.ones(2) * v),
    "torch.add": (TypeError, lambda v: torch.add(v, 1)),
    "value[0]": (TypeError, lambda v: v[0]),
    "len": (TypeError, len),
    "iter": (TypeError, iter),
    "float": (TypeError, float),
    ".shape": (AttributeError, lambda v: v.shape),
    ".numpy": (AttributeError, lambda v: v.numpy),
    ".values = ...": (AttributeError, lambda v: setattr(v, "values", ())),
    ".other = ...": (AttributeError, lambda v: setattr(v, "other", 1)),
}


@pytest.mark.parametrize("use", NOT_A_TENSOR)
def test_a_per_replica_value_is_a_container_and_not_a_tensor(
    per_replica: PerReplica, use: str
) -> None:
    error, call = NOT_A_TENSOR[use]
    with pytest.raises(error):
        call(per_replica)


def test_a_distributed_value_can_be_referred_to_weakly(per_replica: PerReplica) -> None:
    assert weakref.ref(per_replica)() is per_replica


# Printing


def test_a_per_replica_value_prints_a_line_for_each_replica() -> None:
    value = PerReplica([torch.tensor([1.0]), "two", None])
    assert (
        str(value)
        == repr(value)
        == f"{value}"
        == "PerReplica:{\n  0: tensor([1.]),\n  1: two,\n  2: None\n}"
    )


def test_a_mirrored_value_prints_as_one() -> None:
    assert (
        str(Mirrored([torch.tensor(1.0), torch.tensor(1.0)]))
        == "Mirrored:{\n  0: 1.0,\n  1: 1.0\n}"
    )


def test_absent_replicas_are_not_printed() -> None:
    assert str(PerReplica([1, ABSENT, 3, ABSENT])) == "PerReplica:{\n  0: 1,\n  2: 3\n}"


# Copies


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_a_copied_value_has_components_of_its_own(kind: Any) -> None:
    value = kind([torch.tensor([1.0]), torch.tensor([1.0])])
    copied = copy.deepcopy(value)
    assert type(copied) is kind
    assert str(copied) == str(value)
    copied.values[0].zero_()
    assert value.values[0].item() == 1
    assert copy.copy(value).values[0] is value.values[0]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_absent_replicas_stay_absent_in_a_copy(duplicate: Callable[[Any], Any]) -> None:
    strategy = central(3)
    value = strategy.run(lambda x: x + 1, args=(dealt(strategy, torch.arange(2)),))
    copied = duplicate(value)
    assert len(copied.values) == 2
    assert str(copied) == str(value)
    assert strategy.run(lambda x: replica_id() + 1000, args=(copied,)).values == (
        1000,
        1001,
    )


# regroup: the same object, and others


def test_an_object_that_all_but_one_share_is_a_component_of_each() -> None:
    leaf, odd = Leaf(), Leaf()
    assert regroup([leaf, leaf, odd]).values == (leaf, leaf, odd)


def test_none_from_all_replicas_is_none_and_from_some_is_a_component() -> None:
    assert regroup([None, None]) is None
    assert regroup([None, 1]).values == (None, 1)


# regroup: containers


def test_containers_keep_their_types_and_hold_a_value_at_each_leaf() -> None:
    def tree(r: int) -> Any:
        return [
            (Leaf(r), Pair(Leaf(r), [])),
            {"a": Leaf(r), "b": collections.OrderedDict(z=Leaf(r), y=Leaf(r))},
            collections.defaultdict(list, k=Leaf(r)),
        ]

    value = regroup([tree(0), tree(1)])
    assert type(value) is list
    assert type(value[0]) is tuple
    assert type(value[0][1]) is Pair
    assert value[0][1].second == []
    assert type(value[1]) is dict
    assert type(value[1]["b"]) is collections.OrderedDict
    assert list(value[1]["b"]) == ["z", "y"]
    assert type(value[2]) is collections.defaultdict
    assert value[2].default_factory is list
    for leaf in (
        value[0][0],
        value[0][1].first,
        value[1]["a"],
        value[1]["b"]["z"],
        value[1]["b"]["y"],
        value[2]["k"],
    ):
        assert [component.name for component in leaf.values] == [0, 1]


def test_a_dict_of_the_users_own_class_is_one_leaf() -> None:
    # Only containers that torch knows how to make again are opened.
    value = regroup([Batch(x=Leaf(0)), Batch(x=Leaf(1))])
    assert type(value) is PerReplica
    assert all(type(component) is Batch for component in value.values)


@pytest.mark.parametrize("empty", [[], (), {}], ids=repr)
def test_empty_containers_from_all_replicas_are_one(empty: Any) -> None:
    assert regroup([copy.copy(empty), copy.copy(empty)]) == empty


@pytest.mark.parametrize(
    "make",
    [lambda: {1, 2}, lambda: "".join("text"), lambda: b"12", lambda: range(2), Leaf],
)
def test_what_is_no_container_is_one_leaf(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    value = regroup([[first], [second]])
    held = value[0].values if isinstance(value[0], PerReplica) else (value[0],) * 2
    assert held[0] is first
    assert held[1] is second or first is second


def test_what_torch_returns_as_named_fields_keeps_them() -> None:
    value = regroup(
        [
            torch.max(torch.tensor([[1.0, 2.0]]), dim=1),
            torch.max(torch.tensor([[4.0, 3.0]]), dim=1),
        ]
    )
    assert type(value) is torch.return_types.max
    assert [component.item() for component in value.values.values] == [2, 4]
    assert [component.item() for component in value.indices.values] == [1, 0]


def test_a_shape_is_one_leaf() -> None:
    first, second = torch.Size([2, 3]), torch.Size([1, 3])
    value = regroup([first, second])
    assert type(value) is PerReplica
    assert [type(component) for component in value.values] == [torch.Size] * 2
    assert value.values == (first, second)
    assert type(select([first], 0)[0]) is torch.Size


def test_dicts_may_have_their_keys_in_another_order() -> None:
    value = regroup([{"a": Leaf(0), "b": Leaf(1)}, {"b": Leaf(1), "a": Leaf(0)}])
    assert list(value) == ["a", "b"]
    for name, key in enumerate("ab"):
        assert [component.name for component in value[key].values] == [name, name]


# regroup: absent replicas


def test_the_same_object_from_all_that_are_present_is_that_object() -> None:
    leaf = Leaf()
    assert regroup([leaf, ABSENT, leaf]) is leaf
    assert regroup([None, ABSENT]) is None


# regroup: structures that differ

MISMATCHES: dict[str, tuple[Any, Any, str]] = {
    "lengths": ([1], [1, 2], r"the result: a list of 1 and a list of 2"),
    "lengths of tuples": (
        {"x": [1, (2,)]},
        {"x": [1, (2, 3)]},
        r"\['x'\]\[1\]: a tuple of 1 and a tuple of 2",
    ),
    "keys": ({"a": 1}, {"b": 1}, r"the result: keys \['a'\] and keys \['b'\]"),
    "one key more": (
        [{"a": 1}],
        [{"a": 1, "b": 2}],
        r"\[0\]: keys \['a'\] and keys \['a', 'b'\]",
    ),
    "list and tuple": ([1], (1,), r"the result: a list of 1 and a tuple of 1"),
    "container and leaf": ({"x": [1]}, {"x": 1}, r"\['x'\]: a list of 1 and an? int"),
    "leaf and container": ({"x": 1}, {"x": [1]}, r"\['x'\]: an? int and a list of 1"),
    "None and container": ([None], [[]], r"\[0\]: (a )?None(Type)? and a list of 0"),
    "tensor and container": (
        torch.ones(1),
        [torch.ones(1)],
        r"the result: a Tensor and a list of 1",
    ),
    "named tuples": (Pair(1, 2), (1, 2), r"the result: a Pair of 2 and a tuple of 2"),
    "after leaves of other types": (
        (1, [2]),
        (torch.ones(1), [2, 3]),
        r"\[1\]: a list of 1 and a list of 2",
    ),
    "after keys of other types": (
        {"a": 1, "b": {"c": 1}},
        {"a": "x", "b": {}},
        r"\['b'\]: keys \['c'\] and keys \[\]",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_structures_that_differ_are_refused_with_the_place(mismatch: str) -> None:
    first, second, where = MISMATCHES[mismatch]
    sentence = (
        r"^Replicas 0 and 1 returned values of different structure, which cannot be "
        r"put together: "
    )
    with pytest.raises(ValueError, match=sentence + where + r"\."):
        regroup([first, second])


def test_run_names_the_replicas_whose_results_differ(several: Strategy) -> None:
    last = several.num_replicas_in_sync - 1
    with pytest.raises(
        ValueError,
        match=(
            rf"^Replicas 0 and {last} returned values of different "
            r"structure.*\['x'\]\[1\]: "
        ),
    ):
        several.run(lambda: {"x": (1, (2,) if replica_id() < last else ())})


# select


# Any nesting

NESTINGS = st.recursive(
    st.just(Leaf),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from([0, 1, "x"]), inner, max_size=3).map(
            collections.OrderedDict
        ),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=8,
)
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def filled(nesting: Any, make: Callable[[], Any]) -> Any:
    """`nesting` with a new leaf wherever it says `Leaf`."""
    if nesting is Leaf:
        return make()
    if isinstance(nesting, Pair):
        return Pair(*(filled(inner, make) for inner in nesting))
    if isinstance(nesting, dict):
        return type(nesting)(
            (key, filled(inner, make)) for key, inner in nesting.items()
        )
    return type(nesting)(filled(inner, make) for inner in nesting)


def is_same(first: Any, second: Any) -> bool:
    """Whether two trees are of the same types and hold the very same leaves."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            is_same(first[key], second[key]) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_same, first, second))
    return first is second


@settings(quickly, max_examples=25)
@given(NESTINGS, st.integers(1, 4))
def test_run_takes_apart_and_puts_together_any_nesting(
    nesting: Any, replicas: int
) -> None:
    strategy = STRATEGIES[replicas]
    trees = [filled(nesting, Leaf) for _ in range(replicas)]
    value = regroup(trees, always_wrap=True)
    results = strategy.run(lambda x, *, y: (x, y), args=(value,), kwargs={"y": value})
    for r, tree in enumerate(trees):
        assert is_same(select(results, r), (tree, tree))


STRATEGIES = {replicas: central(replicas) for replicas in range(1, 5)}


# Strategy.experimental_local_results


@pytest.mark.parametrize("plain", [3, None, "text", torch.ones(1), Leaf()], ids=repr)
def test_the_local_results_of_a_plain_value_are_itself(
    strategy: Strategy, plain: object
) -> None:
    results = strategy.experimental_local_results(plain)
    assert type(results) is tuple
    assert len(results) == 1
    assert results[0] is plain


@pytest.mark.parametrize("plain", [[1, 2], {"a": 1}, (), [], {"a": [None]}], ids=repr)
def test_the_local_results_of_a_plain_container_are_one_for_each_replica(
    strategy: Strategy, plain: Any
) -> None:
    """As TensorFlow has it.

    Whoever adds up the results of the replicas adds up as many as there are replicas.
    """
    assert (
        strategy.experimental_local_results(plain)
        == (plain,) * strategy.num_replicas_in_sync
    )


@pytest.mark.parametrize("number", [1, 1000, 2.5, 0j], ids=repr)
def test_a_number_that_every_replica_returns_is_one_for_each_of_them(
    several: Strategy, number: Any
) -> None:
    """Python has one object for all small integers and for a constant of the step.

    Counts came back as one.
    """
    count = several.num_replicas_in_sync
    results = several.run(lambda: {"number": number, "flag": True, "name": "x"})
    assert several.experimental_local_results(results["number"]) == (number,) * count
    assert (
        several.experimental_local_results(results)
        == ({"number": number, "flag": True, "name": "x"},) * count
    )
    assert several.reduce("sum", results["number"], axis=None) == number * count
    assert (results["flag"], results["name"]) == (True, "x")


def test_lists_of_different_lengths_are_kept(strategy: Strategy) -> None:
    """Evaluation code returns a string or dict for each row.

    An uneven batch was refused.
    """
    n = strategy.num_replicas_in_sync
    (batch,) = strategy.experimental_distribute_dataset([torch.arange(2 * n + 1)])

    def step(x: torch.Tensor) -> Any:
        names = [f"row {i}" for i in x.tolist()]
        return {
            "loss": x.sum(),
            "names": names,
            "found": ([{"row": i} for i in x], len(x)),
        }

    results = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
    assert [name for one in results for name in one["names"]] == [
        f"row {i}" for i in range(2 * n + 1)
    ]
    assert [int(found["row"]) for one in results for found in one["found"][0]] == list(
        range(2 * n + 1)
    )
    assert sum(one["found"][1] for one in results) == 2 * n + 1
    again = strategy.run(
        lambda result: len(result["names"]), args=(strategy.run(step, args=(batch,)),)
    )
    assert sum(strategy.experimental_local_results(again)) == 2 * n + 1


@pytest.mark.parametrize(
    ("first", "other", "path"),
    [
        (
            {"a": [1], "b": (1,)},
            {"a": [1, 2], "b": (1, 2)},
            r"\['b'\]: a tuple of 1 and a tuple of 2",
        ),
        (([1], {"k": 1}), ([1, 2], {"l": 1}), r"\[1\]: keys \['k'\] and keys \['l'\]"),
        ([1], 1, "a list of 1 and an int"),
        ((1, [2]), (1, (2,)), r"\[1\]: a list of 1 and a tuple of 1"),
    ],
    ids=str,
)
def test_other_differences_of_structure_are_refused(
    first: Any, other: Any, path: str
) -> None:
    two = STRATEGIES[2]
    with pytest.raises(ValueError, match=path):
        two.run(
            lambda: (
                other
                if torchstrategy.get_replica_context().replica_id_in_sync_group
                else first
            )
        )


def test_local_results_are_in_replica_order_and_a_tuple(strategy: Strategy) -> None:
    results = strategy.experimental_local_results(
        strategy.run(lambda: replica_id() + 1000)
    )
    assert type(results) is tuple
    assert results == tuple(range(1000, 1000 + strategy.num_replicas_in_sync))


def test_the_local_results_of_containers_are_a_container_for_each_replica(
    several: Strategy,
) -> None:
    value = several.run(
        lambda: {"a": replica_id() + 1000, "b": (7, [replica_id() + 2000])}
    )
    assert several.experimental_local_results(value) == tuple(
        {"a": r + 1000, "b": (7, [r + 2000])}
        for r in range(several.num_replicas_in_sync)
    )


def test_local_results_of_another_strategys_value_are_its_components() -> None:
    value = central(2).run(lambda: replica_id() + 1000)
    assert central(4).experimental_local_results(value) == (1000, 1001)


def test_local_results_are_those_of_the_replicas_that_are_present() -> None:
    strategy = central(3)
    value = strategy.run(
        lambda x: (x * 2, 7), args=(dealt(strategy, torch.tensor([5, 6])),)
    )
    assert [
        int(result[0]) for result in strategy.experimental_local_results(value)
    ] == [10, 12]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["everywhere", "partial"])), ids=" then ".join
)
def test_local_results_show_nothing_for_an_absent_replica(order: Sequence[str]) -> None:
    strategy = central(3)
    values = {
        "everywhere": strategy.run(lambda: torch.ones(1) * replica_id()),
        "partial": strategy.run(
            lambda x: x * 2, args=(dealt(strategy, torch.tensor([5, 6])),)
        ),
    }
    results = strategy.experimental_local_results(
        {name: values[name] for name in order}
    )
    assert "ABSENT" not in str(results)
    assert [int(result["partial"]) for result in results] == [10, 12]


# Mirrored


@pytest.fixture
def mirrored() -> Any:
    """[2, 4] on each of two replicas."""
    strategy = central(2)
    value = dealt(strategy, torch.arange(4.0))
    return strategy.extended.reduce_to("sum", value, value)


def test_a_reduction_to_a_distributed_destination_is_mirrored(mirrored: Any) -> None:
    assert type(mirrored) is Mirrored
    assert isinstance(mirrored, DistributedValues)
    assert [component.tolist() for component in mirrored.values] == [[2, 4], [2, 4]]


def test_the_components_of_a_mirrored_value_do_not_share_memory(mirrored: Any) -> None:
    mirrored.values[0].zero_()
    assert mirrored.values[1].tolist() == [2, 4]


MIRRORED_USES: dict[str, Callable[[Any], Any]] = {
    **{
        f"operator.{name}": lambda m, name=name: getattr(operator, name)(m, 2)
        for name in (
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "mod",
            "pow",
            "lt",
            "le",
            "gt",
            "ge",
        )
    },
    **{
        f"operator.{name}, reflected": lambda m, name=name: getattr(operator, name)(
            2, m
        )
        for name in ("add", "sub", "mul", "truediv", "floordiv", "pow")
    },
    "value + value": lambda m: m + m,
    "tensor + value": lambda m: torch.ones(2) + m,
    "value @ value": lambda m: m @ m,
    "-value": operator.neg,
    "abs(value)": abs,
    "value[1]": lambda m: m[1],
    "len": len,
    "float": lambda m: float(m.sum()),
    ".sum()": lambda m: m.sum(),
    ".shape": lambda m: m.shape,
    ".dtype": lambda m: m.dtype,
    "torch.sum": torch.sum,
    "torch.stack": lambda m: torch.stack([m, m]),
    "keyword": lambda m: torch.add(torch.ones(2), other=m),
}


@pytest.mark.parametrize("use", MIRRORED_USES)
def test_a_mirrored_value_acts_as_the_tensor_that_it_is_on_every_replica(
    mirrored: Any, use: str
) -> None:
    with torch.device(mirrored.values[0].device):
        expected = MIRRORED_USES[use](torch.tensor([2.0, 4.0]))
        result = MIRRORED_USES[use](mirrored)
    assert type(result) is type(expected)
    assert (
        torch.equal(result, expected)
        if isinstance(expected, torch.Tensor)
        else result == expected
    )


def test_a_mirrored_argument_is_its_component_in_each_replica(mirrored: Any) -> None:
    value = central(2).run(
        lambda m: (type(m), m is mirrored.values[replica_id()]), args=(mirrored,)
    )
    assert value == (torch.Tensor, True)


def test_a_mirrored_value_from_outside_is_in_a_replica_the_component_there() -> None:
    mirrored = Mirrored([torch.tensor([1.0]), torch.tensor([1.0])])
    ours = central(2).run(
        lambda: mirrored.data_ptr() == mirrored.values[replica_id()].data_ptr()
    )
    assert ours is True


def test_a_mirrored_value_has_no_attribute_that_its_tensor_has_not(
    mirrored: Any,
) -> None:
    with pytest.raises(
        AttributeError, match=r"^'Tensor' object has no attribute 'weight'"
    ):
        _ = mirrored.weight


def test_the_public_names_are_those_of_the_classes() -> None:
    assert torchstrategy.DistributedValues is DistributedValues
    assert torchstrategy.PerReplica is PerReplica and issubclass(
        PerReplica, torchstrategy.DistributedValues
    )
