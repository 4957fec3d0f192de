"""What a torchstrategy.DataParallel may be given, and what it may return."""

from __future__ import annotations

import collections
import re
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from data_parallel import (
    FIRST,
    ROWS,
    Calls,
    Output,
    alike,
    here,
    parallel,
    returning,
    same_gradients,
)
from problems import close, deal, replica_id
from topologies import central, compute_devices


class Opaque:
    """Something of the user's own."""


Pair = namedtuple("Pair", "first second")


# What may be given


def nested(x: torch.Tensor) -> dict[str, Any]:
    """A tensor in everything that can hold one."""
    return {
        "dict": {"x": x},
        "list": [x, 1],
        "tuple": (x, None),
        "named tuple": Pair(x, "text"),
        "ordered": OrderedDict(x=x),
        "dataclass": Output(x, [x]),
        "mapping": UserDict(x=x),
        "deque": collections.deque([x]),
        "deep": [{"x": (Pair([x], Output({"x": x})),)}],
        "scalar": torch.tensor(3.0, device=x.device),
    }


def test_tensors_are_found_wherever_they_are() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    returning(lambda *args, **kwargs: seen.append((replica_id(), kwargs)))(
        ROWS, **nested(ROWS)
    )
    assert sorted(r for r, _ in seen) == [0, 1]
    for r, kwargs in seen:
        expected = nested(ROWS.chunk(2)[r].to(compute_devices(2)[r]))
        assert shapes(kwargs) == shapes(expected)
        assert (
            kwargs["deep"][0]["x"][0].second.logits["x"].tolist()
            == expected["list"][0].tolist()
        )
        assert (
            kwargs["deep"][0]["x"][0].second.logits["x"].device
            == expected["list"][0].device
        )
        assert (
            type(kwargs["mapping"]) is UserDict and type(kwargs["named tuple"]) is Pair
        )
        assert kwargs["scalar"].item() == 3.0


def shapes(tree: Any) -> Any:
    """What a tree is made of."""
    return re.sub(r"tensor\(.*?\)(?=[,})\]])", "tensor", repr(tree).replace("\n", ""))


def test_what_is_no_tensor_is_the_very_object_in_each_replica() -> None:
    things = [
        Opaque(),
        "text",
        3,
        None,
        torch.Size([4, 2]),
        {1, 2},
        Output("a", "b"),
        torch.float32,
    ]
    seen: list[list[Any]] = []
    returning(lambda x, *given: seen.append(list(given)))(ROWS, *things)
    assert len(seen) == 2
    assert all(
        got is thing for given in seen for got, thing in zip(given, things, strict=True)
    )


def test_the_users_own_containers_are_not_written() -> None:
    mapping, output = UserDict(x=ROWS), Output(ROWS)
    returning(lambda *_: None)(mapping, output, [ROWS])
    assert mapping["x"] is ROWS and output.logits is ROWS


@pytest.mark.parametrize(
    ("args", "kwargs", "dim", "error", "match"),
    [
        (
            (ROWS,),
            {"mask": torch.ones(1, 2)},
            0,
            ValueError,
            r"inputs\[0\] has 4 rows and mask has 1",
        ),
        (
            ([ROWS, torch.ones(3)],),
            {},
            0,
            ValueError,
            r"inputs\[0\]\[0\] has 4 rows and inputs\[0\]\[1\] has 3",
        ),
        (
            (ROWS, Output(ROWS, ROWS.T)),
            {},
            0,
            ValueError,
            r"inputs\[0\] has 4 rows and inputs\[1\]\.hidden has 2",
        ),
        (
            (UserDict(a=ROWS, b=ROWS.T),),
            {},
            0,
            ValueError,
            r"inputs\[0\]\['a'\] has 4 rows and inputs\[0\]\['b'\]",
        ),
        (
            (ROWS, torch.ones(4)),
            {},
            1,
            ValueError,
            r"dim=1, and inputs\[1\], of shape \(4,\), has no such dimension",
        ),
        (
            (ROWS,),
            {},
            -3,
            ValueError,
            r"dim=-3, and inputs\[0\], of shape \(4, 2\), has no such dimension",
        ),
        (
            (rnn.pack_sequence([ROWS, ROWS]),),
            {},
            0,
            TypeError,
            r"inputs\[0\] is a PackedSequence",
        ),
    ],
)
def test_inputs_that_cannot_be_cut_are_refused_by_name(
    args: Any, kwargs: Any, dim: int, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        returning(lambda *args, **kwargs: None, dim=dim)(*args, **kwargs)


def test_a_batch_that_is_dealt_already_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"batch is a PerReplica|batch is a distributed value"
    ):
        returning(lambda **_: None)(batch=deal(central(2), ROWS))


def test_packed_sequences_go_to_a_single_device_and_come_back_in_a_list() -> None:
    packed = rnn.pack_sequence([ROWS, ROWS[:2]])
    moved, *_ = parallel(Calls(lambda module, x: (x,)), 1)(packed)
    assert moved.data.device == FIRST
    outputs = returning(lambda x: rnn.pack_sequence([x, x]), output_device="cpu")(ROWS)
    assert [rnn.unpack_sequence(output)[1].tolist() for output in outputs] == [
        x.tolist() for x in ROWS.chunk(2)
    ]
    assert {output.data.device.type for output in outputs} == {"cpu"}


# What may be returned


def test_outputs_of_any_nesting_come_back_as_from_one_device() -> None:
    model = returning(lambda x: nested(x * 2), 3)
    output = model(ROWS)
    expected = nested(here(ROWS * 2))
    close(output["dict"], expected["dict"])
    close(output["list"][0], expected["list"][0])
    close(output["deque"][0], expected["deque"][0])
    close(output["dataclass"].hidden[0], expected["dataclass"].hidden[0])
    close(output["mapping"]["x"], expected["mapping"]["x"])
    close(
        output["deep"][0]["x"][0].second.logits["x"],
        expected["deep"][0]["x"][0].second.logits["x"],
    )
    assert [type(value) for value in output.values()] == [
        type(value) for value in expected.values()
    ]
    assert output["list"][1] == [1, 1] and output["named tuple"].second == [
        "text",
        "text",
    ]
    assert output["tuple"][1] is None
    assert output["scalar"].tolist() == [3.0, 3.0]


def test_a_tensor_without_dimensions_comes_back_as_a_vector() -> None:
    model, plain = alike(lambda: Calls(lambda module, x: (module.weight * x).mean()), 2)
    losses = model(here(ROWS))
    assert losses.tolist() == [1.5, 5.5]
    losses.mean().backward()
    plain(here(ROWS)).backward()
    same_gradients(model, plain)


def test_a_mean_over_rows_that_the_module_takes_itself_is_a_mean_for_each_replica() -> (
    None
):
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]])
    means = returning(lambda x: x.mean(), 4)(x)
    assert means.tolist() == [0.5, 2.5, 100.0]
    assert means.mean().item() != pytest.approx(x.mean().item())
    rows = returning(lambda x: x.mean(1), 4)(x)
    assert rows.mean().item() == pytest.approx(x.mean().item())


RESULTS: dict[str, Callable[[int], Any]] = {
    "a string": lambda r: "done",
    "a number": lambda r: 7 + r,
    "the same number": lambda r: 7,
    "an object": lambda r: FIXED[r],
    "None and a string": lambda r: None if r == 0 else "x",
    "a string and None": lambda r: "x" if r == 0 else None,
    "a size": lambda r: torch.Size([r]),
    "a truth": lambda r: r == 0,
    "numbers and None": lambda r: [None, 3.5][r],
    "objects of different classes": lambda r: [FIXED[0], Output(1)][r],
}
FIXED = [Opaque(), Opaque()]


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_no_tensor_comes_back_as_a_list_over_the_replicas(name: str) -> None:
    result = returning(lambda x: RESULTS[name](replica_id()))(ROWS)
    assert result == [RESULTS[name](0), RESULTS[name](1)]


def test_none_stays_none_and_next_to_a_tensor_it_is_in_a_list() -> None:
    assert returning(lambda x: None)(ROWS) is None
    first, second = returning(lambda x: x if replica_id() else None)(ROWS)
    assert (
        first is None
        and second.device == FIRST
        and second.tolist() == ROWS[2:].tolist()
    )


def test_a_dataclass_comes_back_field_by_field() -> None:
    model = parallel(
        Calls(lambda module, x: Output(module.weight * x, (x.sum(), None)))
    )
    output = model(here(ROWS))
    assert isinstance(output, Output)
    close(output.logits, here(ROWS))
    assert output.hidden[0].tolist() == [6.0, 22.0] and output.hidden[1] is None
    output.logits.sum().backward()
    assert model.module.weight.grad.item() == ROWS.sum().item()


class ModelOutput(OrderedDict[str, Any]):
    """What transformers' models return: an ordered dict that is also a dataclass.

    Its items are attributes.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_an_object_that_is_a_mapping_keeps_its_items_and_its_attributes() -> None:
    def forward(x: torch.Tensor) -> ModelOutput:
        output = ModelOutput()
        output["logits"] = x
        output["loss"] = x.sum()
        return output

    output = returning(forward)(here(ROWS))
    assert type(output) is ModelOutput and list(output) == ["logits", "loss"]
    assert output.logits is output["logits"] and output.loss.tolist() == [6.0, 22.0]  # type: ignore[attr-defined]


def test_torchs_own_results_keep_their_names() -> None:
    assert returning(lambda x: x.max(dim=1))(ROWS).values.tolist() == [
        1.0,
        3.0,
        5.0,
        7.0,
    ]


@pytest.mark.parametrize(
    ("results", "match"),
    [
        (lambda r: [1] * (r + 1), r"different structure"),
        (lambda r: {"a": 1, "bc"[r]: 2}, r"different structure"),
        (
            lambda r: UserDict({"bc"[r]: 2}),
            r"different structure.*differ in what they hold: \['b'\] and \['c'\]",
        ),
        (lambda r: Output([1] * (r + 1)), r"output\.logits of different structure"),
        (
            lambda r: torch.ones(2, 3 + r),
            r"output cannot be put together along dim=0: \(2, 3\).* and \(2, 4\)",
        ),
        (
            lambda r: {"x": torch.ones([2] * (r + 1))},
            r"output\['x'\] cannot be put together",
        ),
        (
            lambda r: Output([torch.ones(2, dtype=[torch.int64, torch.float32][r])]),
            r"output\.logits\[0\] cannot",
        ),
        (
            lambda r: torch.ones([2] * r),
            r"as output cannot be put together.*squeeze\(1\)",
        ),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused_by_name(
    results: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        returning(lambda x: results(replica_id()))(ROWS)


def test_an_output_without_the_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be put together along dim=1: \(4,\)"):
        returning(lambda x: x.sum(1), dim=1)(ROWS)


@pytest.mark.parametrize("output_device", [None, "cpu", compute_devices(2)[1]])
@pytest.mark.parametrize("replicas", [1, 2])
def test_outputs_are_where_they_are_asked_for(
    output_device: Any, replicas: int
) -> None:
    model = parallel(nn.Linear(2, 2), replicas, output_device=output_device)
    wanted = FIRST if output_device is None else torch.device(output_device)
    output = model(ROWS)
    assert output.device == torch.device(
        wanted.type, wanted.index if wanted.type != "cpu" else None
    )
    output.sum().backward()
    assert model.module.weight.grad.device == FIRST
