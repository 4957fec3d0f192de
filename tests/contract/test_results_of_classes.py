"""`gather` and `reduce` take what people return from a step.

Dataclasses, named tuples, the outputs of models.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

import torchstrategy
from topologies import compute_devices
from torchstrategy import CentralStorageStrategy, Strategy


@dataclass
class Output:
    """What a step computes."""

    loss: torch.Tensor
    scores: torch.Tensor
    name: str = "net"
    hidden: list[torch.Tensor] = field(default_factory=list)
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    scores: torch.Tensor


class Pair(NamedTuple):
    loss: torch.Tensor
    scores: torch.Tensor


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose items are attributes, too, as models of transformers return."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@pytest.fixture
def strategy() -> Strategy:
    return CentralStorageStrategy(compute_devices(3))


def run(strategy: Strategy, make: Any) -> Any:
    """What three replicas return of rows 0 1 2, 3 4 5 and 6."""
    (batch,) = strategy.experimental_distribute_dataset([torch.arange(7.0)])
    return strategy.run(make, args=(batch,)), batch


def test_a_dataclass_is_gathered_field_by_field(strategy: Strategy) -> None:
    found, _ = run(
        strategy,
        lambda x: Output(x + 0, x * 2, hidden=[x, x + 1], extra={"deep": x - 1}),
    )
    gathered = strategy.gather(found, axis=0)
    assert type(gathered) is Output
    assert gathered.loss.tolist() == list(range(7))
    assert gathered.scores.tolist() == [2.0 * i for i in range(7)]
    assert [h.tolist() for h in gathered.hidden] == [list(range(7)), list(range(1, 8))]
    assert gathered.extra["deep"].tolist() == list(range(-1, 6))
    assert gathered.name == "net"
    assert found.values[0].loss.tolist() == [0, 1, 2]  # it is a new object


def test_a_dataclass_is_reduced_field_by_field(strategy: Strategy) -> None:
    found, batch = run(strategy, lambda x: Output(x.mean(), x.sum()))
    reduced = strategy.reduce("mean", found, axis=None, weights=batch)
    assert reduced.loss.item() == 3.0
    assert strategy.reduce("mean", found, axis=None).loss.item() == pytest.approx(
        11 / 3
    )
    assert reduced.name == "net" and reduced.extra is None and reduced.hidden == []
    rows, _ = run(strategy, lambda x: Frozen(x))
    assert strategy.reduce("mean", rows, axis=0).scores.item() == 3.0
    assert strategy.reduce("sum", rows, axis=0).scores.item() == 21.0


def test_a_named_tuple_and_a_mapping_stay_of_their_class(strategy: Strategy) -> None:
    pair, _ = run(strategy, lambda x: Pair(x.mean().reshape(1), x))
    gathered = strategy.gather(pair, axis=0)
    assert (
        type(gathered) is Pair
        and gathered.loss.tolist() == [1, 4, 6]
        and gathered.scores.tolist() == list(range(7))
    )
    output, _ = run(strategy, lambda x: ModelOutput(loss=x.mean()))
    reduced = strategy.reduce("mean", output, axis=None)
    assert type(reduced) is ModelOutput and reduced.loss.item() == pytest.approx(11 / 3)
    logits, _ = run(strategy, lambda x: ModelOutput(logits=x))
    assert type(strategy.gather(logits, axis=0)) is ModelOutput
    assert strategy.gather(logits, axis=0).logits.tolist() == list(range(7))


def test_dataclasses_in_a_list_are_gathered_field_by_field(strategy: Strategy) -> None:
    found, _ = run(strategy, lambda x: {"parts": [Frozen(x), Frozen(x + 1)]})
    gathered = strategy.gather(found, axis=0)
    assert [type(part) for part in gathered["parts"]] == [Frozen, Frozen]
    assert gathered["parts"][1].scores.tolist() == list(range(1, 8))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda x: {"scores": x, "loss": x.mean()}, r"value\['loss'\]"),
        (lambda x: (x, [x, x.mean()]), r"value\[1\]\[1\]"),
        (lambda x: Output(x.mean(), x), r"value\.loss"),
        (lambda x: Output(x, x, hidden=[x.sum()]), r"value\.hidden\[0\]"),
        (
            lambda x: {"out": [Output(x, x, extra={"n": x.sum()})]},
            r"value\['out'\]\[0\]\.extra\['n'\]",
        ),
        (lambda x: Pair(x.mean(), x), r"value\.loss"),
    ],
)
def test_a_scalar_among_tensors_is_named_by_its_path(
    strategy: Strategy, make: Any, path: str
) -> None:
    found, _ = run(strategy, make)
    sentence = (
        rf"^{path}: Scalars cannot be gathered: .* unsqueeze\(0\) .* "
        r'strategy\.reduce\("mean", value, axis=None\)'
    )
    with pytest.raises(ValueError, match=sentence):
        strategy.gather(found, axis=0)


def test_a_scalar_alone_has_no_path(strategy: Strategy) -> None:
    found, _ = run(strategy, lambda x: x.mean())
    with pytest.raises(ValueError, match=r"^Scalars cannot be gathered"):
        strategy.gather(found, axis=0)


def test_what_has_no_numbers_is_named(strategy: Strategy) -> None:
    found, _ = run(strategy, lambda x: {"loss": x.mean(), "texts": str(x)})
    with pytest.raises(
        TypeError, match=r"^value\['texts'\]: Only tensors, arrays and numbers"
    ):
        strategy.reduce("mean", found, axis=None)


def test_mappings_with_other_keys_are_refused(strategy: Strategy) -> None:
    found, _ = run(strategy, lambda x: ModelOutput({f"part{len(x)}": x}))
    with pytest.raises(
        ValueError, match=r"the ModelOutput of each replica has other parts"
    ):
        strategy.gather(found, axis=0)


@pytest.mark.parametrize("make", [Output, Pair])
def test_one_replica_gathers_a_container_of_the_same_class(make: Any) -> None:
    strategy = torchstrategy.OneDeviceStrategy("cpu")
    found = strategy.run(lambda x: make(x + 0, x), args=(torch.arange(3.0),))
    assert type(strategy.gather(found, axis=0)) is make
