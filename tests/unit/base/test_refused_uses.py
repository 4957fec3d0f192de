"""A per-replica value is no tensor and no number.

It says in one message what to write in place of each use.
"""

from __future__ import annotations

import copy
import json
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchstrategy
from torchstrategy._base.distributed_values import PerReplica

USES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "item": ("value.item", lambda v: v.item()),
    "float": ("float(value)", float),
    "int": ("int(value)", int),
    "bool": ("bool(value)", bool),
    "if": ("bool(value)", lambda v: 1 if v else 2),
    "complex": ("complex(value)", complex),
    "format": ('f"{value:.4f}"', lambda v: f"{v:.4f}"),
    "round": ("round(value)", lambda v: round(v, 3)),
    "floor": ("math.floor(value)", math.floor),
    "abs": ("abs(value)", abs),
    "add": ("value + ...", lambda v: v + 1),
    "add in place": ("value + ...", lambda v: exec("v += 1", {"v": v})),
    "added to a number": ("... + value", lambda v: 0.0 + v),
    "added to an array": ("value as a numpy array", lambda v: np.ones(2) + v),
    "added to a tensor": ("... + value", lambda v: torch.ones(2) + v),
    "mul": ("... * value", lambda v: 2 * v),
    "truediv": ("value / ...", lambda v: v / 3),
    "pow": ("value ** ...", lambda v: v**2),
    "neg": ("-value", lambda v: -v),
    "matmul": ("value @ ...", lambda v: v @ v),
    "sum": ("... + value", lambda v: sum([v, v])),
    "gt": ("value > ...", lambda v: v > 0),
    "less than a number": ("value > ...", lambda v: operator.lt(0, v)),
    "max": ("value > ...", lambda v: max([v, v])),
    "sorted": ("value < ...", lambda v: sorted([v, v])),
    "index": ("value[...]", lambda v: v[0]),
    "write an item": ("value[...] = ...", lambda v: v.__setitem__(0, 1)),
    "unpack": ("iter(value)", lambda v: (lambda a, b: a)(*v)),
    "loop": ("iter(value)", lambda v: [row for row in v]),
    "len": ("len(value)", len),
    "as an index": ("value as an index", lambda v: [1, 2][v]),
    "numpy": ("value as a numpy array", lambda v: np.asarray(v, dtype=float)),
    "numpy mean": ("value as a numpy array", lambda v: np.mean([v, v])),
    "a method": ("value.mean", lambda v: v.mean()),
    "detach": ("value.detach", lambda v: v.detach()),
    "backward": ("value.backward", lambda v: v.backward()),
    "cpu": ("value.cpu", lambda v: v.cpu()),
    "shape": ("value.shape", lambda v: v.shape),
    "size": ("value.size", lambda v: v.size(0)),
    "stack": ("torch.stack(value)", lambda v: torch.stack([v, v])),
    "a keyword": (
        "torch.where(value)",
        lambda v: torch.where(torch.ones(2) > 0, input=torch.ones(2), other=v),
    ),
    "argument of torch": ("torch.exp(value)", torch.exp),
}


@pytest.fixture
def value() -> PerReplica:
    return PerReplica([torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize("use", USES)
def test_a_use_as_a_tensor_or_number_says_what_to_write(
    value: PerReplica, use: str
) -> None:
    said, do = USES[use]
    with pytest.raises((TypeError, AttributeError)) as refused:
        do(value)
    message = str(refused.value)
    assert message.startswith(
        f"{said} does not work: this value is a PerReplica, with a component for each "
        "of 2 replicas"
    )
    assert 'strategy.reduce("mean", value, axis=None)' in message
    assert "strategy.gather(value, axis=0)" in message
    assert "strategy.experimental_local_results(value)" in message
    assert "value.values" in message
    assert "strategy.run(step, args=(value,))" in message


def test_a_worker_says_that_other_workers_have_replicas_too() -> None:
    """In two workers of one replica each, the message said "1 replica".

    The user had two.
    """
    batch = PerReplica([torch.ones(3)], rows=(3,), rows_of_all=(3, 2))
    with pytest.raises(
        TypeError,
        match=r"this worker's 1 replica, of 2 in all workers \(rows of the batch: 3\)",
    ):
        len(batch)
    with pytest.raises(
        TypeError, match="this worker's replicas, of which there is one"
    ):
        float(PerReplica([torch.ones(())]))


def test_what_the_message_says_to_write_works() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    value = strategy.run(
        lambda: (
            torch.ones(1)
            * (1 + torchstrategy.get_replica_context().replica_id_in_sync_group)
        )
    )
    assert strategy.reduce("mean", value, axis=None).item() == 1.5
    assert strategy.reduce("mean", value, axis=0).item() == 1.5
    assert strategy.gather(value, axis=0).tolist() == [1.0, 2.0]
    assert strategy.experimental_local_results(value) == value.values
    assert strategy.count_rows(value) == 2
    doubled = strategy.run(lambda x: 2 * x, args=(value,))
    assert [x.item() for x in doubled.values] == [2.0, 4.0]


def test_the_length_of_a_batch_names_its_rows() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
    (batch,) = strategy.experimental_distribute_dataset([torch.ones(7, 2)])
    for use in (len, lambda batch: batch.size(0), lambda batch: batch.shape[0]):
        with pytest.raises(
            (TypeError, AttributeError), match=r"rows of the batch: 3, 3, 1"
        ):
            use(batch)


def test_a_trainer_that_adds_up_losses_fails_at_that_line() -> None:
    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    total = 0.0
    loss = strategy.run(lambda: torch.rand(()))
    with pytest.raises(TypeError, match=r"\.\.\. \+ value does not work"):
        total += loss
    with pytest.raises(AttributeError, match=r"value\.item does not work"):
        total += loss.item()


def test_equality_hash_print_and_copies_are_those_of_an_object(
    value: PerReplica,
) -> None:
    assert value == value and value != PerReplica(value.values)
    assert value in {value: 1} and value in [value]
    assert f"{value}" == str(value) == repr(value)
    assert copy.copy(value).values == value.values
    assert copy.deepcopy(value).values == value.values


def test_a_program_may_ask_whether_it_is_a_tensor(value: PerReplica) -> None:
    assert not isinstance(value, torch.Tensor) and not torch.is_tensor(value)
    assert not hasattr(value, "item") and getattr(value, "device", None) is None
    assert not callable(value)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps({"loss": value})


def test_private_names_are_answered_in_a_word(value: PerReplica) -> None:
    with pytest.raises(AttributeError, match=r"^_repr_html_$"):
        value._repr_html_  # type: ignore[attr-defined]  # noqa: B018
