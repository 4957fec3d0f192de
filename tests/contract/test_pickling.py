"""What belongs to this process is not saved and not sent to another one.

The error says what it is.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchstrategy
from torchstrategy import DistributedValues, Strategy


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4)


THINGS: dict[str, tuple[Callable[[Strategy], Any], str]] = {
    "strategy": (
        lambda s: s,
        r"This \w+ cannot be pickled: .*model\.state_dict\(\).*make the strategy anew",
    ),
    "scope": (lambda s: s.scope(), r"This \w+ cannot be pickled"),
    "dataset": (
        lambda s: s.experimental_distribute_dataset(_loader()),
        r"This DistributedDataset .*load_state_dict",
    ),
    "iterator": (
        lambda s: iter(s.experimental_distribute_dataset(_loader())),
        r"This DistributedIterator .*state_dict\(\) of the dataset",
    ),
}


@pytest.mark.parametrize(
    "save", [pickle.dumps, lambda thing: torch.save({"thing": thing}, io.BytesIO())]
)
@pytest.mark.parametrize("thing", THINGS)
def test_what_is_of_this_process_says_that_it_cannot_be_pickled(
    several: Strategy, thing: str, save: Any
) -> None:
    """A strategy, a dataset or an iterator in what is saved ended in an error.

    It was `cannot pickle 'weakref.ReferenceType' object`.
    """
    make, message = THINGS[thing]
    with pytest.raises(TypeError, match=message):
        save(make(several))


def test_a_value_of_several_replicas_says_what_to_save(several: Strategy) -> None:
    """It was saved, and `torch.load` refused the file."""
    value = several.run(lambda: torch.ones(2))
    assert isinstance(value, DistributedValues)
    with pytest.raises(
        TypeError,
        match=(
            r"This PerReplica cannot be pickled: "
            r".*experimental_local_results\(value\)"
        ),
    ):
        torch.save({"losses": value}, io.BytesIO())
    file = io.BytesIO()
    torch.save(several.experimental_local_results(value), file)
    file.seek(0)
    assert len(torch.load(file)) == several.num_replicas_in_sync


def test_a_strategy_and_a_dataset_can_still_be_copied_in_this_process(
    several: Strategy,
) -> None:
    dataset = several.experimental_distribute_dataset(_loader())
    assert (
        len(list(copy.deepcopy(several).experimental_distribute_dataset(_loader())))
        == 2
    )
    next(iter(dataset))
    copied = copy.deepcopy([dataset, dataset])
    assert copied[0] is copied[1] is not dataset
    assert len(list(copied[0])) == len(list(copy.copy(dataset))) == 2


@pytest.mark.parametrize("load_ahead", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_distributed_dataset_has_what_was_put_on_it(
    copied: Any, load_ahead: bool
) -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])
    options = torchstrategy.InputOptions(load_ahead=load_ahead)
    dataset = strategy.experimental_distribute_dataset([torch.arange(4.0)], options)
    dataset.split = "validation"
    other = copied(dataset)
    assert other.split == "validation"
    assert [batch.values[1].tolist() for batch in other] == [[2.0, 3.0]]
