"""What a batch may be made of: every kind of value is dealt out by rows.

The step sees each whole, and leaves it as it was.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import rnn

import torchstrategy
from batches import (
    CONTAINERS,
    KINDS,
    Attributes,
    Frozen,
    Output,
    Plain,
    Prepared,
    Store,
    Triple,
    Word,
    as_rows,
    dealt,
    in_the_steps,
    inside,
    jagged,
    jagged_with_holes,
    packed,
    sequences,
    table,
)
from conditions import without_simulated_devices
from problems import (
    assert_close,
    built,
    data,
    gradients,
    mlp,
    mse,
    parameters,
    replica_id,
    sgd,
    shown,
)
from topologies import central, compute_devices
from torchstrategy import InputOptions, register_batch_type
from torchstrategy._base.devices import memory_device
from torchstrategy._base.streams import memory_of
from torchstrategy._data.steps import split_in_proportion

STRATEGIES = {replicas: central(replicas) for replicas in range(1, 4)}
ONE_DEVICE = torchstrategy.OneDeviceStrategy(compute_devices(1)[0])
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# Every kind


def type_of_pieces(whole: Any) -> type:
    """Arrays of numbers become tensors, and what is cut from a parameter is one."""
    if isinstance(whole, nn.Parameter):
        return torch.Tensor
    is_numbers = (
        isinstance(whole, np.ndarray)
        and not np.ma.isMaskedArray(whole)
        and whole.dtype.kind in "if"
    )
    return torch.Tensor if is_numbers else type(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_dealt_by_rows(kind: str) -> None:
    """It arrives in the steps, and what was given stays as it was."""
    for replicas, rows in [(2, 5), (3, 5), (3, 4), (2, 1)]:
        whole, expected = KINDS[kind](rows), as_rows(KINDS[kind](rows))
        value = dealt(STRATEGIES[replicas], {"x": torch.zeros(rows), "value": whole})[
            "value"
        ]
        size = -(-rows // replicas)
        pieces = [expected[r * size : (r + 1) * size] for r in range(replicas)]
        assert [as_rows(component) for component in value.values] == pieces
        assert {type(component) for component in value.values} == {
            type_of_pieces(whole)
        }
        assert value.rows == tuple(map(len, pieces))
        assert in_the_steps(STRATEGIES[replicas], value, as_rows) == pieces
        assert as_rows(whole) == expected


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind not in ("packed", "packed in order", "windows")],
)
def test_a_batch_without_rows_is_dealt_as_pieces_without_rows(kind: str) -> None:
    value = dealt(STRATEGIES[2], {"x": torch.zeros(0, 2), "value": KINDS[kind](0)})[
        "value"
    ]
    assert in_the_steps(STRATEGIES[2], value, as_rows) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_replica_gets_every_kind_whole(kind: str) -> None:
    expected = as_rows(KINDS[kind](3))
    for strategy in (ONE_DEVICE, STRATEGIES[1]):
        value = dealt(strategy, [KINDS[kind](3)])[0]
        assert type(value) in (type_of_pieces(KINDS[kind](3)), nn.Parameter)
        assert as_rows(value) == expected
        assert in_the_steps(strategy, value, as_rows) == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_without_rows_sits_out_whatever_the_batch_is_made_of(
    kind: str,
) -> None:
    value = dealt(STRATEGIES[3], [torch.zeros(4), KINDS[kind](4)])[1]
    ran = STRATEGIES[3].run(
        lambda part: (replica_id(), len(as_rows(part))), args=(value,)
    )
    assert STRATEGIES[3].experimental_local_results(ran) == ((0, 2), (1, 2))


@without_simulated_devices
@pytest.mark.parametrize(
    "kind",
    ["floats", "expanded", "every other", "array", "field of records", "strings array"],
)
def test_pieces_on_the_cpu_share_the_memory_of_the_batch(kind: str) -> None:
    whole = np.asarray(KINDS[kind](4))
    value = dealt(STRATEGIES[2], whole)
    is_shared = [np.shares_memory(whole, np.asarray(piece)) for piece in value.values]
    assert is_shared == [kind != "field of records"] * 2, (
        "torch has no tensors with strides that are no whole items"
    )


def test_pieces_of_a_tensor_with_gradient_give_it_theirs() -> None:
    whole = table(4).requires_grad_()
    value = dealt(STRATEGIES[2], whole)
    STRATEGIES[2].run(lambda part: (part**2).sum().backward(), args=(value,))
    assert torch.equal(whole.grad, 2 * table(4))


# Packed sequences


@pytest.mark.parametrize(
    "is_sorted", [False, True], ids=["in any order", "longest first"]
)
def test_a_piece_of_packed_sequences_is_its_rows_packed_by_hand(
    is_sorted: bool,
) -> None:
    whole = packed(5, is_sorted=is_sorted)
    rows = rnn.unpack_sequence(whole)
    value = dealt(STRATEGIES[2], whole)
    for piece, part in zip(value.values, (rows[:3], rows[3:]), strict=True):
        by_hand = rnn.pack_sequence(part, enforce_sorted=is_sorted)
        for found, wanted in zip(piece, by_hand, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(
    "layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__
)
def test_a_recurrent_layer_computes_of_the_pieces_what_it_computes_of_the_whole(
    layer: type[nn.RNNBase],
) -> None:
    strategy = STRATEGIES[3]
    (model, _), (twin, _) = built(
        strategy, lambda: layer(1, 4, dtype=torch.float64), None
    )
    whole = rnn.pack_sequence(
        [part.double() for part in sequences(4)], enforce_sorted=False
    )
    expected = [row.tolist() for row in rnn.unpack_sequence(twin(whole)[0])]
    seen = in_the_steps(
        strategy, dealt(strategy, whole), lambda part: as_rows(model(part)[0])
    )
    assert [len(rows) for rows in seen] == [2, 2, 0], "and it runs without rows, too"
    for found, wanted in zip(seen[0] + seen[1], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


# Nested tensors. All in one test, because torch takes a second to import them.


def test_a_jagged_tensor_is_dealt_by_rows() -> None:
    for make in (jagged, jagged_with_holes, lambda rows: jagged(rows).transpose(1, 2)):
        for rows in (5, 1):
            whole = make(rows)
            value = dealt(STRATEGIES[2], {"value": whole, "twice": whole * 2})
            size = -(-rows // 2)
            expected = as_rows(whole)
            pieces = [expected[:size], expected[size:]]
            assert in_the_steps(STRATEGIES[2], value["value"], as_rows) == pieces
            assert all(
                component.is_contiguous() == whole.is_contiguous()
                for component in value["value"].values
            )
            # Pieces of tensors of one shape are of one shape, so that they can be
            # added.
            sums = in_the_steps(
                STRATEGIES[2],
                value,
                lambda part: as_rows(part["value"] * 2 - part["twice"]),
            )
            assert sums == [as_rows(piece * 0) for piece in value["value"].values]
            assert as_rows(whole) == expected
    with_lengths = jagged_with_holes(3)
    parts = memory_of(with_lengths)
    assert [id(part) for part in parts[1:]] == [
        id(with_lengths.offsets()),
        id(with_lengths.lengths()),
    ]
    assert as_rows(dealt(ONE_DEVICE, whole)) == as_rows(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        strided = torch.nested.nested_tensor(sequences(2), layout=torch.strided)
    with pytest.raises(
        TypeError,
        match=r"^batch is a nested tensor \(torch\.strided\), and it is not known how ",
    ):
        dealt(STRATEGIES[2], strided)


# Containers


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_arrives_with_its_class_and_with_the_rows_of_its_parts(
    name: str,
) -> None:
    whole = CONTAINERS[name](x=table(3), y=["a", "b", "c"], note="whole")
    parts = inside(whole)
    for strategy in (STRATEGIES[2], STRATEGIES[1]):
        value = dealt(strategy, {"x": torch.zeros(3), "held": whole})["held"]
        replicas = strategy.num_replicas_in_sync
        size = -(-3 // replicas)
        seen = in_the_steps(
            strategy,
            value,
            lambda held: (type(held), as_rows(inside(held)[0]), *inside(held)[1:]),
        )
        for r in range(replicas):
            rows = slice(r * size, (r + 1) * size)
            assert seen[r] == (
                type(whole),
                parts[0][rows].tolist(),
                parts[1][rows],
                "whole",
            )
    assert all(now is then for now, then in zip(inside(whole), parts, strict=True))
    assert len(parts[0]) == len(parts[1]) == 3


def test_an_object_that_is_prepared_once_is_not_prepared_again() -> None:
    whole = Prepared(table(3), table(3), note=torch.tensor(7.0))
    whole.extra = "is no field"  # type: ignore[attr-defined]
    before = dict(vars(whole))

    def read(part: Prepared) -> Any:
        return (
            part.x.tolist(),
            part.total.item(),
            part.note.item(),
            part.extra,
            hasattr(part, "later"),
        )

    seen = in_the_steps(STRATEGIES[2], dealt(STRATEGIES[2], whole), read)
    rows = (table(3) + 1).tolist()
    assert seen == [
        (rows[:2], 45, 7, "is no field", False),
        (rows[2:], 45, 7, "is no field", False),
    ]
    assert vars(whole) == before


def test_an_output_has_its_pieces_as_items_and_as_attributes() -> None:
    pieces = dealt(STRATEGIES[2], Output(x=table(3))).values
    assert [piece.x.tolist() for piece in pieces] == [
        piece["x"].tolist() for piece in pieces
    ]
    assert [piece.y for piece in pieces] == [None, None]


def test_a_dict_with_a_default_keeps_it() -> None:
    value = dealt(STRATEGIES[2], collections.defaultdict(list, x=table(2)))
    assert value["other"] == []


def test_a_mapping_whose_copy_shares_its_items_is_refused() -> None:
    """It stays as it was."""
    x, store = table(4), Store(note="whole", y=[1, 2, 3, 4])
    store["x"] = x
    for batch in (store, {"held": Frozen(x, store, None)}):
        with pytest.raises(
            TypeError,
            match=(
                r"^copy\.copy\(\) of a Store shares its items .* a method __copy__, or "
                r"say"
            ),
        ):
            dealt(STRATEGIES[2], batch)
        assert (
            store["x"] is x
            and store["y"] == [1, 2, 3, 4]
            and list(store) == ["note", "y", "x"]
        )


LEAVES = ("floats", "array", "sparse", "strings", "registered", "numbers")
leaves = st.sampled_from(LEAVES).map(lambda kind: KINDS[kind](3))
wholes = st.sampled_from(
    [7, None, "note", b"note", 2.5, True, torch.Size([3, 2]), np.float64(1)]
)
trees = st.recursive(
    leaves,
    lambda trees: st.builds(
        lambda name, x, y, note: CONTAINERS[name](x=x, y=y, note=note),
        st.sampled_from(sorted({*CONTAINERS} - {"prepared"})),
        trees,
        trees,
        wholes,
    ),
    max_leaves=6,
)


def leaves_in(tree: Any) -> Iterator[Any]:
    """Its containers, leaves and what has no rows, in order."""
    if type(tree) in {
        type(make(x=0, y=0, note=0))
        for name, make in CONTAINERS.items()
        if name != "prepared"
    } and not (type(tree) is list and isinstance(tree[0], (str, float))):
        yield type(tree)
        for part in inside(tree):
            yield from leaves_in(part)
    elif type(tree) in (torch.Tensor, np.ndarray, list, Word):
        yield as_rows(tree)
    else:
        yield tree


def cut(leaf: Any, rows: slice) -> Any:
    return leaf[rows] if type(leaf) is list else leaf


@quickly
@given(trees, st.integers(2, 3))
def test_containers_and_kinds_nest_to_any_depth(tree: Any, replicas: int) -> None:
    before = list(leaves_in(tree))
    seen = in_the_steps(
        STRATEGIES[replicas],
        dealt(STRATEGIES[replicas], [torch.ones(3), tree])[1],
        lambda part: list(leaves_in(part)),
    )
    size = -(-3 // replicas)
    assert seen == [
        [cut(leaf, slice(r * size, (r + 1) * size)) for leaf in before]
        for r in range(replicas)
    ]
    assert list(leaves_in(tree)) == before


# Things without rows


@pytest.mark.parametrize("empty", [[], {}, (), collections.OrderedDict()], ids=shown)
def test_empty_containers_are_given_to_every_replica(empty: Any) -> None:
    value = dealt(STRATEGIES[2], {"x": table(3), "empty": empty})
    assert in_the_steps(STRATEGIES[2], value, lambda part: part["empty"]) == [
        empty,
        empty,
    ]
    assert type(value["empty"]) is type(empty)


@pytest.mark.parametrize(
    "one",
    [torch.Size([3, 2]), np.array(2.5), np.array("text"), np.float32(2)],
    ids=shown,
)
def test_what_has_no_dimensions_is_given_whole(one: Any) -> None:
    value = dealt(STRATEGIES[2], [table(3), Plain(one, table(3), [])])
    seen = in_the_steps(STRATEGIES[2], value[1], lambda part: part.x)
    assert all(what is one for what in seen)


def test_an_object_without_rows_is_given_whole() -> None:
    whole = Plain(torch.tensor(2.0), "note", None)
    for rows in (1, 2, 3, 4):  # whatever is in it, its parts are no rows
        value = dealt(STRATEGIES[2], {"x": table(rows), "held": whole})
        assert (
            in_the_steps(
                STRATEGIES[2], value["held"], lambda part: (part.x.item(), part.y)
            )
            == [(2.0, "note")] * 2
        )


def test_a_list_of_tensors_without_dimensions_is_a_list_of_rows() -> None:
    value = dealt(
        STRATEGIES[2], [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    )
    assert [[item.item() for item in piece] for piece in value.values] == [[1, 2], [3]]


@pytest.mark.parametrize("strings", [["a", "b", "c"], ("a", "b", "c")], ids=shown)
def test_where_a_datasets_function_runs_dry_lists_have_no_rows(strings: Any) -> None:
    elements = [{"x": torch.ones(k), "s": strings[:k]} for k in (2, 3, 0, 1)]
    for count in range(1, 5):
        dataset = STRATEGIES[2].distribute_datasets_from_function(
            lambda context, count=count: elements[:count]
        )
        seen = [
            rows
            for step in dataset
            for rows in in_the_steps(STRATEGIES[2], step["s"], list)
        ]
        assert seen[:count] == [list(element["s"]) for element in elements[:count]]
        assert seen[count:] == [[]] * (count % 2)


# What cannot be dealt

x4, x6 = torch.ones(4, 2), torch.ones(6)
DISAGREEING: list[tuple[Any, str]] = [
    ({"x": x4, "y": x6}, "['y']"),
    ((x4, x6), "[1]"),
    ([x4, {"m": (x6,)}], "[1]['m'][0]"),
    (Triple(x4, x6, None), ".y"),
    (Plain(x4, x6, None), ".y"),
    ({"x": x4, "d": Plain(x6, "note", None)}, "['d'].x"),
    (
        [x4, Plain("note", Frozen(None, {"deep": [x6, 2]}, 0), None)],
        "[1].y.y['deep'][0]",
    ),
    (collections.UserDict(x=x4, y=x6, note=None), "['y']"),
    (Attributes(x=x4, y=collections.UserDict(z=x6), note=None), "['y']['z']"),
    (Output(x=x4, y=x6), ".y"),
    ({"x": x4, "s": ["a", "b"]}, "['s']"),
    ({"x": x4, "s": ("a", "b", "c")}, "['s']"),
    ({"x": x4, "p": packed(3)}, "['p']"),
    ({"x": x4, "p": table(5).to_sparse()}, "['p']"),
    ({"x": x4, "a": np.array(["a", "b"])}, "['a']"),
    ({"x": x4, "w": Word("abc", torch.zeros(3))}, "['w']"),
]


@pytest.mark.parametrize(
    ("batch", "name"), DISAGREEING, ids=[name for _, name in DISAGREEING]
)
def test_parts_that_disagree_on_the_rows_are_refused_by_name(
    batch: Any, name: str
) -> None:
    for strategy in (STRATEGIES[2], STRATEGIES[3]):
        with pytest.raises(
            ValueError,
            match=r"^The leaves of a batch have different numbers of rows: batch",
        ) as caught:
            dealt(strategy, batch)
        assert f" and batch{name} has " in str(caught.value)


class Unheard:
    """A class that nobody knows."""


UNKNOWN: list[tuple[Any, str, str]] = [
    (
        {"x": x4, "u": Unheard()},
        "batch['u'] is an Unheard",
        "register_batch_type(Unheard, rows=..., take=..., ",
    ),
    (
        Plain(x4, [Unheard(), x4], None),
        "batch.y[0] is an Unheard",
        "Let the loader's collate_fn make tensors",
    ),
    (
        collections.UserDict(x=x4, y={"s": {1, 2}}, note=None),
        "batch['y']['s'] is a set",
        "register_batch_type(set",
    ),
    (
        [x4, Frozen(x4, collections.UserList("abcd"), 0)],
        "batch[1].y is an UserList",
        "register_batch_type(UserList",
    ),
    ([x4, Plain], "batch[1] is a type", "collate_fn"),
    (
        {"a": np.ones(4, np.longdouble)},
        f"batch['a'] is an array of {np.dtype(np.longdouble)}",
        "astype('float64')",
    ),
    (
        {"l": [np.ones(4, np.longdouble)] * 4},
        "batch['l'][0] is an array of",
        "astype('float64')",
    ),
    (
        [Plain(np.ones(4, np.clongdouble), 0, 0)],
        "batch[0].x is an array of complex",
        "torch has no such numbers",
    ),
]


@pytest.mark.parametrize(
    ("batch", "what", "then"), UNKNOWN, ids=[what for _, what, _ in UNKNOWN]
)
def test_what_is_not_known_is_refused_by_name_with_what_to_do(
    batch: Any, what: str, then: str
) -> None:
    with pytest.raises(TypeError) as caught:
        dealt(STRATEGIES[2], batch)
    assert str(caught.value).startswith(what)
    assert "it is not known how to distribute its rows. " in str(caught.value)
    assert then in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc], ids=str)
def test_a_compressed_sparse_batch_is_refused_by_name(layout: torch.layout) -> None:
    sentence = (
        rf"^batch\['x'\] is a sparse tensor \({layout}\), .* make a dense tensor, or "
        r"one of layout torch\.sparse_"
    )
    with pytest.raises(TypeError, match=sentence):
        dealt(STRATEGIES[2], {"x": torch.eye(4).to_sparse(layout=layout)})


@pytest.mark.parametrize(
    "unknown",
    [Unheard(), {1, 2}, np.ones(2, np.longdouble), Plain],
    ids=lambda u: type(u).__name__,
)
def test_a_lone_replica_gets_what_is_not_known_as_it_is(unknown: Any) -> None:
    assert dealt(ONE_DEVICE, {"u": unknown, "x": table(2)})["u"] is unknown


# One's own types


def own_type(**functions: Any) -> type[Any]:
    """A new class with `x` and `name`, registered."""

    class Own:
        def __init__(self, x: Any, name: str = "own") -> None:
            self.x, self.name = x, name

    defaults = {
        "rows": lambda own: len(own.x),
        "take": lambda own, rows: type(own)(own.x[rows], own.name),
        "apply": lambda own, fn: type(own)(fn(own.x), own.name),
    }
    register_batch_type(Own, **{**defaults, **functions})
    return Own


@pytest.mark.parametrize(
    "wrap",
    [lambda v: v, lambda v: [v], lambda v: {"k": (v,)}, lambda v: Plain(v, 1, None)],
)
def test_a_registered_type_is_dealt_as_it_says_inside_any_container(
    wrap: Callable[[Any], Any],
) -> None:
    cls = own_type()

    def found(part: Any) -> Any:
        while not isinstance(part, cls):
            part = (
                part.x
                if isinstance(part, Plain)
                else next(iter(part.values() if isinstance(part, dict) else part))
            )
        return part.x.tolist(), part.name

    whole = cls(torch.arange(5), "mine")
    for strategy, expected in [
        (STRATEGIES[2], [[0, 1, 2], [3, 4]]),
        (ONE_DEVICE, [[0, 1, 2, 3, 4]]),
    ]:
        seen = in_the_steps(strategy, dealt(strategy, wrap(whole)), found)
        assert seen == [(rows, "mine") for rows in expected]
    assert whole.x.tolist() == [0, 1, 2, 3, 4]


def test_what_is_registered_without_rows_is_given_whole() -> None:
    cls = own_type(rows=None, take=None, apply=None)
    whole = cls(torch.arange(5))
    value = dealt(
        STRATEGIES[2], {"x": table(3), "whole": whole, "each": [whole, whole, whole]}
    )
    assert value["whole"] is whole
    assert in_the_steps(
        STRATEGIES[2], value, lambda part: (part["whole"] is whole, len(part["each"]))
    ) == [
        (True, 2),
        (True, 1),
    ]


def test_what_is_registered_without_apply_holds_no_tensors() -> None:
    cls = own_type(apply=None)
    value = dealt(STRATEGIES[2], cls([1, 2, 3]))
    assert [piece.x for piece in value.values] == [[1, 2], [3]]


def test_a_list_of_registered_batches_is_a_container() -> None:
    cls = own_type()
    value = dealt(STRATEGIES[2], [cls(torch.arange(3)), cls(torch.arange(3) + 10)])
    assert in_the_steps(
        STRATEGIES[2], value, lambda parts: [part.x.tolist() for part in parts]
    ) == [
        [[0, 1], [10, 11]],
        [[2], [12]],
    ]


def test_a_subclass_is_dealt_as_its_most_derived_registered_class() -> None:
    cls = own_type()
    child = type("Child", (cls,), {})
    grandchild = type("Grandchild", (child,), {})
    backwards = lambda own, rows: type(own)(own.x.flip(0)[rows])  # noqa: E731
    register_batch_type(child, rows=lambda own: len(own.x), take=backwards)
    for made, expected in [
        (cls, [[0, 1], [2]]),
        (child, [[2, 1], [0]]),
        (grandchild, [[2, 1], [0]]),
    ]:
        pieces = dealt(STRATEGIES[2], made(torch.arange(3))).values
        assert [piece.x.tolist() for piece in pieces] == expected
        assert {type(piece) for piece in pieces} == {made}


OVER: dict[type[Any], Callable[[Any], Any]] = {
    dict: lambda cls: cls(x=torch.arange(4)),
    collections.UserDict: lambda cls: cls(x=torch.arange(4)),
    list: lambda cls: cls(["a", "b", "c"]),
    torch.Tensor: lambda cls: torch.arange(4).as_subclass(cls),
    np.ndarray: lambda cls: np.arange(4).view(cls),
    rnn.PackedSequence: lambda cls: cls(torch.arange(4), torch.tensor([4])),
}


@pytest.mark.parametrize("base", OVER, ids=lambda base: base.__name__)
def test_a_registration_comes_before_all_that_is_known(base: type[Any]) -> None:
    cls = type("Own", (base,), {})
    register_batch_type(cls, rows=None)
    whole = OVER[base](cls)
    assert dealt(STRATEGIES[2], {"x": table(3), "own": whole})["own"] is whole


def test_a_class_that_pytree_knows_becomes_one_value() -> None:
    cls = collections.namedtuple("Own", "x name")
    batch = cls(torch.arange(3), "own")
    assert type(dealt(STRATEGIES[2], batch)) is cls
    register_batch_type(
        cls,
        rows=lambda own: len(own.x),
        take=lambda own, rows: cls(own.x[rows], f"rows {rows.start} to {rows.stop}"),
        apply=lambda own, fn: cls(fn(own.x), own.name),
    )
    value = dealt(STRATEGIES[2], batch)
    assert isinstance(value, torchstrategy.DistributedValues)
    assert in_the_steps(STRATEGIES[2], value, lambda part: part.name) == [
        "rows 0 to 2",
        "rows 2 to 3",
    ]
    assert in_the_steps(
        ONE_DEVICE, dealt(ONE_DEVICE, batch), lambda part: part.name
    ) == ["own"]


def test_rows_may_be_any_whole_number() -> None:
    for count in (np.int64(3), torch.tensor(3), 3):
        cls = own_type(
            rows=lambda own, count=count: count if len(own.x) == 3 else len(own.x),
        )
        assert dealt(STRATEGIES[2], (table(3), cls(torch.arange(3))))[1].rows == (2, 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"take": lambda own, rows: own},
        r"The take function .* returned 3 rows for slice\(0, 2\), which is 2\.",
    ),
    (
        {"take": lambda own, rows: type(own)(own.x[:1])},
        r"returned 1 row for slice\(0, 2\), which is 2\.",
    ),
    (
        {"take": lambda own, rows: own.x[rows]},
        r"The take function that Own .* returned a Tensor, and not a Own\.",
    ),
    (
        {"take": lambda own, rows: None},
        r"The take function that Own was registered with returned a NoneType",
    ),
    (
        {"apply": lambda own, fn: own.x},
        r"The apply function that Own was registered with returned a Tensor",
    ),
    (
        {"apply": lambda own, fn: None},
        r"The apply function that Own was registered with returned a NoneType",
    ),
    (
        {"rows": lambda own: "3"},
        r"The rows function that Own .* returned '3', which is no number of rows\.",
    ),
    ({"rows": lambda own: None}, r"returned None, which is no number of rows\."),
    ({"rows": lambda own: 3.0}, r"returned 3\.0, which is no number of rows\."),
    ({"rows": lambda own: -1}, r"returned -1, which is no number of rows\."),
]


@pytest.mark.parametrize(
    ("functions", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG]
)
def test_functions_of_a_registration_that_would_lose_rows_are_found(
    functions: Any, sentence: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        dealt(STRATEGIES[2], own_type(**functions)(torch.arange(3)))


def test_an_error_in_a_function_of_a_registration_comes_out_as_it_is() -> None:
    error = KeyError("mine")

    def fail(*_: Any) -> Any:
        raise error

    for name in ("rows", "take", "apply"):
        with pytest.raises(KeyError) as caught:
            dealt(STRATEGIES[2], own_type(**{name: fail})(torch.arange(3)))
        assert caught.value is error
        error.__traceback__ = None


@pytest.mark.parametrize("what", [3, "Own", None, Plain(1, 2, 3), len], ids=shown)
def test_only_a_class_can_be_registered(what: Any) -> None:
    with pytest.raises(TypeError, match=r"^register_batch_type takes a class; got "):
        register_batch_type(what, rows=None)


@pytest.mark.parametrize(
    "cls",
    [
        object,
        torch.Tensor,
        np.ndarray,
        list,
        tuple,
        dict,
        str,
        int,
        type(None),
        torch.Size,
    ],
)
def test_how_plain_types_are_dealt_out_is_fixed(cls: Any) -> None:
    with pytest.raises(
        TypeError,
        match=(
            rf"^How a {cls.__name__} is distributed is fixed: register a type of your "
            r"own"
        ),
    ):
        register_batch_type(cls, rows=None)


@pytest.mark.parametrize("name", ["rows", "take", "apply"])
def test_what_a_registration_is_told_are_functions(name: str) -> None:
    with pytest.raises(
        TypeError,
        match=(
            rf"^register_batch_type\(Own, {name}=\.\.\.\) takes a function; got 3, an "
            r"int\."
        ),
    ):
        own_type(**{name: 3})


def test_a_type_is_registered_once() -> None:
    cls = own_type()
    with pytest.raises(
        ValueError,
        match=(
            r"^Own is registered already\. Register a type "
            r"once, where it is defined\."
        ),
    ):
        register_batch_type(cls, rows=None)


def test_what_has_rows_must_be_takeable_and_what_has_none_must_not() -> None:
    for missing in ("rows", "take"):
        with pytest.raises(
            ValueError,
            match=r"^register_batch_type\(Own, \.\.\.\) takes rows=.* or neither of ",
        ):
            own_type(**{missing: None})


def test_a_type_that_was_refused_is_not_registered() -> None:
    cls = type("Own", (), {})
    with pytest.raises(ValueError, match=r"takes rows=\.\.\. and take="):
        register_batch_type(cls, rows=len)
    register_batch_type(cls, rows=None)


# Shares of unequal size

shares = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=6
).filter(any)


@quickly
@given(shares, st.integers(0, 10_000))
def test_each_piece_is_less_than_a_row_away_from_its_share(
    shares: list[float], rows: int
) -> None:
    slices = split_in_proportion(shares)(rows)
    assert [row for piece in slices for row in range(piece.start, piece.stop)] == list(
        range(rows)
    )
    assert all(piece.start <= piece.stop for piece in slices)
    total = sum(map(Fraction, shares))
    for piece, share in zip(slices, shares, strict=True):
        size = piece.stop - piece.start
        assert abs(size - rows * Fraction(share) / total) < 1 + Fraction(1, 10**8)
        assert share or not size


@pytest.mark.parametrize(
    ("shares", "rows", "expected"),
    [
        ([3, 1], 8, [6, 2]),
        ([3, 1], 5, [4, 1]),
        ([3, 1], 1, [1, 0]),
        ([1, 3], 1, [1, 0]),
        ([0, 1], 3, [0, 3]),
        ([1, 0, 1], 5, [3, 0, 2]),
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        ([1e-300, 1e300], 4, [0, 4]),
        ([5e-324], 4, [4]),
        ([1, 2], 0, [0, 0]),
    ],
    ids=shown,
)
def test_rows_go_by_their_shares(
    shares: list[float], rows: int, expected: list[int]
) -> None:
    strategy = central(len(shares))
    value = dealt(
        strategy,
        {"x": torch.arange(rows), "s": [str(row) for row in range(rows)]},
        row_shares=shares,
    )
    parts = strategy.experimental_local_results(value["x"])
    assert [len(part) for part in parts] == expected
    assert [row for part in parts for row in part.tolist()] == list(range(rows))


@pytest.mark.parametrize(
    "shares", [[3, 1], [1, 5], [1, 0], [0, 1], [2, 1, 4]], ids=shown
)
def test_gradients_of_unequal_pieces_are_those_of_the_whole_batch(
    make: Any, shares: list[float]
) -> None:
    strategy = make(len(shares))
    (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    batches = [data(rows, seed=rows) for rows in (8, 7, 1, 2, 9)]
    dataset = strategy.experimental_distribute_dataset(
        batches, InputOptions(row_shares=shares)
    )
    for k, (batch, whole) in enumerate(zip(dataset, batches, strict=True)):
        strategy.run(step, args=(model, optimizer, batch))
        step(twin, plain, whole)
        case = f"shares {shares}, batch {k}"
        assert_close(gradients(model), gradients(twin), case, 1e-10)
        assert_close(parameters(model), parameters(twin), case, 1e-10)


def test_a_replica_whose_share_is_nothing_sits_out() -> None:
    strategy = STRATEGIES[3]
    value = dealt(strategy, torch.arange(6), row_shares=[1, 0, 2])
    ran = strategy.run(lambda part: (replica_id(), len(part)), args=(value,))
    assert strategy.experimental_local_results(ran) == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("replicas", "shares"),
    [(2, [1]), (2, [1, 1, 1]), (1, [1, 1]), (3, [3, 1])],
    ids=shown,
)
def test_there_must_be_a_share_for_each_replica(
    replicas: int, shares: list[float]
) -> None:
    given_shares = tuple(map(float, shares))
    with pytest.raises(ValueError) as caught:
        STRATEGIES[replicas].experimental_distribute_dataset(
            [], InputOptions(row_shares=shares)
        )
    assert str(caught.value).startswith(
        f"InputOptions(row_shares={given_shares}) has {len(shares)} number"
    )


def test_a_lone_replica_may_be_told_its_share() -> None:
    assert torch.equal(
        dealt(ONE_DEVICE, torch.arange(3), row_shares=[7]).cpu(), torch.arange(3)
    )


def test_shares_of_what_is_not_cut_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^InputOptions\(row_shares=\.\.\.\) says how a "
            r"global batch is cut, and "
        ),
    ):
        STRATEGIES[2].distribute_datasets_from_function(
            lambda context: [], InputOptions(row_shares=[3, 1])
        )


@dataclass
class Measured:
    rows: torch.Tensor

    @functools.cached_property
    def mean(self) -> torch.Tensor:
        return self.rows.mean()


def test_a_piece_of_a_dataclass_computes_its_fields_again() -> None:
    # copy.copy takes over what cached_property keeps in the instance: the mean of the
    # whole batch, in every replica.
    """They were computed of the whole."""
    source = Measured(torch.tensor([1.0, 2.0, 6.0]))
    assert source.mean == 3
    value = dealt(STRATEGIES[2], source)
    assert [piece.mean.item() for piece in value.values] == [1.5, 6]
    assert source.mean == 3


class _Graphs:
    """As those of PyG: there is no batch of none."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        assert items, "no such batch can be made"
        self.items = items


register_batch_type(
    _Graphs,
    rows=lambda graphs: len(graphs.items),
    take=lambda graphs, rows: _Graphs(graphs.items[rows]),
    apply=lambda graphs, fn: _Graphs([fn(item) for item in graphs.items]),
)


@dataclasses.dataclass
class _Labelled:
    graphs: _Graphs
    labels: torch.Tensor


GRAPHS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda graphs: graphs, lambda batch: batch),
    "in a dict": (
        lambda graphs: {"x": [graphs], "y": torch.ones(len(graphs.items))},
        lambda batch: batch["x"][0],
    ),
    "in a dataclass": (
        lambda graphs: _Labelled(graphs, torch.ones(len(graphs.items))),
        lambda batch: batch.graphs,
    ),
}


@pytest.mark.parametrize("where", GRAPHS)
def test_no_empty_batch_is_made_that_nobody_gets(where: str) -> None:
    """`take` was called for pieces of replicas that sit the step out, and failed."""
    wrapped, found = GRAPHS[where]
    strategy, source = (
        STRATEGIES[3],
        [wrapped(_Graphs(list(torch.ones(rows, 2)))) for rows in (3, 4, 1)],
    )
    dataset = strategy.experimental_distribute_dataset(source)
    assert repr(dataset.element_spec)
    counts: list[int] = []
    for batch in dataset:
        assert repr(batch)
        results = strategy.run(
            lambda batch: torch.tensor([len(found(batch).items)]), args=(batch,)
        )
        counts.append(int(strategy.gather(results, axis=0).sum()))
    assert counts == [3, 4, 1]
    with pytest.raises(
        ValueError,
        match=r"A replica got no rows, and there is no \w+ without rows.*no such batch",
    ):
        strategy.run(
            lambda batch: 1,
            args=(batch,),
            options=torchstrategy.RunOptions(run_empty_replicas=True),
        )


def test_a_dataset_function_that_runs_dry_asks_for_no_empty_batch() -> None:
    strategy = STRATEGIES[3]
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [_Graphs([torch.ones(2)])] * 4
    )
    results = [
        strategy.run(lambda batch: len(batch.items), args=(batch,)) for batch in dataset
    ]
    assert [strategy.experimental_local_results(value) for value in results] == [
        (1, 1, 1),
        (1,),
    ]


def test_an_empty_batch_is_on_the_device_of_its_replica() -> None:
    strategy = STRATEGIES[3]
    register_batch_type(
        _Rows,
        rows=lambda batch: len(batch.tensor),
        take=lambda batch, rows: _Rows(batch.tensor[rows]),
        apply=lambda batch, fn: _Rows(fn(batch.tensor)),
    )
    (batch,) = strategy.experimental_distribute_dataset([_Rows(torch.ones(4, 2))])
    everywhere = torchstrategy.RunOptions(run_empty_replicas=True)
    results = strategy.run(
        lambda rows: (rows.tensor.shape, rows.tensor.device),
        args=(batch,),
        options=everywhere,
    )
    shapes, devices = zip(*strategy.experimental_local_results(results), strict=True)
    assert [tuple(shape) for shape in shapes] == [(2, 2), (2, 2), (0, 2)]
    assert [device.type for device in devices] == [compute_devices(1)[0].type] * 3
    assert list(devices) == list(map(memory_device, compute_devices(3)))


class _Rows:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


# Lists of which each item is a row


def _sequences(rows: int) -> list[torch.Tensor]:
    return [torch.full((7, 3), float(row)) for row in range(rows)]


@pytest.mark.parametrize(
    "options",
    [InputOptions(lists_are_rows=True), InputOptions(True, lists_are_rows=True)],
)
def test_a_list_of_equally_long_sequences_is_dealt_by_sequences(
    options: InputOptions,
) -> None:
    """`collate_fn=list` was cut along time.

    Each replica got a part of every sequence, and nothing said so.
    """
    loader: Any = torch.utils.data.DataLoader(
        _sequences(5), batch_size=5, collate_fn=list
    )  # type: ignore[arg-type]
    for strategy, counts in [
        (STRATEGIES[2], [3, 2]),
        (STRATEGIES[3], [2, 2, 1]),
        (ONE_DEVICE, [5]),
    ]:
        (batch,) = strategy.experimental_distribute_dataset(loader, options)
        found = strategy.run(
            lambda rows: (
                type(rows) is list,
                len(rows),
                [float(row.mean()) for row in rows],
                rows[0].device,
            ),
            args=(batch,),
        )
        results = strategy.experimental_local_results(found)
        assert [result[:2] for result in results] == [(True, count) for count in counts]
        assert [mean for result in results for mean in result[2]] == [
            0.0,
            1.0,
            2.0,
            3.0,
            4.0,
        ]
        assert {result[3].type for result in results} == {compute_devices(1)[0].type}


def test_the_boxes_of_images_are_dealt_by_images() -> None:
    """The error named neither the option nor `register_batch_type`."""
    targets = [
        {"boxes": torch.ones(count, 4), "names": ["x"] * count} for count in (0, 2, 1)
    ]
    strategy = STRATEGIES[2]
    for batch in [
        (torch.ones(3, 1), targets),
        Plain([torch.ones(i + 1) for i in range(3)], targets, None),
    ]:
        with pytest.raises(
            ValueError, match=r"lists_are_rows=True.*torchstrategy\.register_batch_type"
        ):
            list(strategy.experimental_distribute_dataset([batch]))
        (value,) = strategy.experimental_distribute_dataset(
            [batch], InputOptions(lists_are_rows=True)
        )

        def boxes(batch: Any) -> list[int]:
            found = batch[1] if isinstance(batch, tuple) else batch.y
            assert (
                type(found) is list
                and found[0]["boxes"].device.type == compute_devices(1)[0].type
            )
            return [len(one["boxes"]) for one in found]

        assert strategy.experimental_local_results(
            strategy.run(boxes, args=(value,))
        ) == ([0, 2], [1])


def test_elements_of_a_dataset_function_may_have_lists_of_rows() -> None:
    strategy = STRATEGIES[2]
    element = [torch.ones(2), torch.ones(3)]
    dataset = strategy.distribute_datasets_from_function(
        lambda _: [element] * 3, InputOptions(lists_are_rows=True)
    )
    counts = [
        strategy.run(lambda rows: sum(map(len, rows)), args=(batch,))
        for batch in dataset
    ]
    assert [strategy.experimental_local_results(value) for value in counts] == [
        (5, 5),
        (5,),
    ]


def test_a_list_of_tensors_that_may_be_rows_is_warned_of_once() -> None:
    strategy = STRATEGIES[2]
    dataset = strategy.experimental_distribute_dataset([_sequences(3), _sequences(4)])
    message = (
        r"a list of 3 tensors of shape \(7, 3\).*InputOptions\(lists_are_rows=True\)"
    )
    with pytest.warns(UserWarning, match=message) as told:
        assert [len(batch) for batch in dataset] == [3, 4]
    assert len(told) == 1


def test_columns_are_not_warned_of() -> None:
    strategy = STRATEGIES[2]
    columns: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*_sequences(3)), batch_size=7
    )
    for source in (
        columns,
        [_sequences(2)],
        [tuple(_sequences(3))],
        [[*_sequences(2), torch.ones(7)]],
    ):
        assert len(list(strategy.experimental_distribute_dataset(source))) == 1
    silent = InputOptions(lists_are_rows=False)
    assert (
        len(list(strategy.experimental_distribute_dataset([_sequences(3)], silent)))
        == 1
    )
