"""Batches whose first dimension holds no rows.

Lists of samples, as for object detection, and time first.

torchvision's references make batches by `tuple(zip(*batch))`. A strategy cut each image
along its channels, and the step ended in an error of a convolution; with images only,
nothing said a word. The refusal that came for the boxes said `lists_are_rows=True`,
which is no help for a tuple.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import torchstrategy
from topologies import central
from torchstrategy import InputOptions

BY_ITEMS = InputOptions(lists_are_rows=True)


def image(index: int, is_even: bool = False) -> torch.Tensor:
    return torch.full((3, 8, 8 if is_even else 8 + index), float(index))


TARGETS: dict[str, Callable[[int], Any]] = {
    "boxes": lambda i: {"boxes": torch.zeros(i, 4), "labels": torch.zeros(i)},
    "as many boxes as channels": lambda i: {
        "boxes": torch.zeros(3, 4),
        "labels": torch.zeros(3),
    },
    "numbers": lambda i: i,
    "strings": lambda i: str(i),
    "tensors without dimensions": lambda i: torch.tensor(i),
    "dicts of numbers": lambda i: {"id": i},
}


def zipped(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


def lists(batch: Any) -> Any:
    return tuple(map(list, zip(*batch, strict=True)))


def named(batch: Any) -> Any:
    return dict(zip(("images", "targets"), lists(batch), strict=True))


def loader(
    target: str, collate: Any, count: int = 4, size: int = 4, **image_options: Any
) -> Any:
    samples: Any = [
        (image(i, **image_options), TARGETS[target](i)) for i in range(count)
    ]
    return DataLoader(samples, batch_size=size, collate_fn=collate)


def images_of(
    strategy: torchstrategy.Strategy, source: Any, options: InputOptions | None
) -> list[Any]:
    """The shapes of the images that each replica gets."""
    seen: list[Any] = []

    def step(batch: Any) -> None:
        images = batch["images"] if isinstance(batch, dict) else batch[0]
        seen.append([tuple(one.shape) for one in images])

    for batch in strategy.experimental_distribute_dataset(source, options):
        strategy.run(step, args=(batch,))
    return seen


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("collate", [zipped, lists, named, list])
@pytest.mark.parametrize("is_even", [False, True])
def test_samples_are_refused_and_the_message_is_followed(
    target: str, collate: Any, is_even: bool
) -> None:
    source = loader(target, collate, is_even=is_even)
    strategy = central(2)
    with pytest.raises(
        ValueError,
        match=r"^batch.* is a (tuple|list) of 4 items, as many as there are samples",
    ) as caught:
        list(strategy.experimental_distribute_dataset(source))
    for said in (
        "collate_fn=lambda batch: tuple(map(list, zip(*batch)))",
        "torchstrategy.InputOptions(lists_are_rows=True)",
        "torchstrategy.register_batch_type(...)",
    ):
        assert said in str(caught.value)
    source = loader(
        target,
        lambda batch: tuple(map(list, zip(*batch, strict=True))),
        is_even=is_even,
    )
    first, second = (
        [tuple(image(i, is_even).shape) for i in range(2)],
        [tuple(image(i, is_even).shape) for i in (2, 3)],
    )
    assert sorted(images_of(strategy, source, BY_ITEMS)) == sorted([first, second])


def test_tuples_are_refused_where_lists_are_rows_too() -> None:
    with pytest.raises(ValueError, match=r"batch\[0\] is a tuple of 4 items"):
        list(
            central(2).experimental_distribute_dataset(
                loader("numbers", zipped), BY_ITEMS
            )
        )


def test_few_samples_are_known_by_their_number() -> None:
    """The loader has fewer than its batch size."""
    with pytest.raises(ValueError, match=r"batch\[0\] is a tuple of 4 items"):
        list(
            central(2).experimental_distribute_dataset(
                loader("numbers", zipped, count=4, size=16)
            )
        )


def test_datasets_of_functions_are_looked_at_too() -> None:
    """Nothing is cut there, but an image's channels would count as rows.

    The replicas would weigh as many.
    """
    with pytest.raises(ValueError, match=r"batch\[0\] is a tuple of 4 items"):
        list(
            central(2).distribute_datasets_from_function(
                lambda _: loader("numbers", zipped)
            )
        )


def test_to_look_at_the_spec_first_hides_nothing() -> None:
    dataset = central(2).experimental_distribute_dataset(loader("numbers", zipped))
    assert dataset.element_spec is not None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"batch\[0\] is a tuple of 4 items"):
            next(iter(dataset))


@pytest.mark.parametrize(
    "batch",
    [
        [(image(i), i) for i in range(4)],
        [{"image": image(i), "id": i} for i in range(4)],
        (tuple(image(i) for i in range(4)), (0, 1, 2, 3)),
        {"images": [image(i) for i in range(4)]},
    ],
    ids=["list of tuples", "list of dicts", "tuple of images", "dict of images"],
)
def test_where_nobody_knows_the_samples_there_is_a_warning(batch: Any) -> None:
    strategy = central(2)
    dataset = strategy.experimental_distribute_dataset([batch, batch])
    with pytest.warns(
        UserWarning, match=r"InputOptions\(lists_are_rows=True\)"
    ) as told:
        assert len(list(dataset)) == 2
    assert len(told) == 1
    assert (
        len(
            list(
                strategy.experimental_distribute_dataset(
                    [batch], InputOptions(lists_are_rows=False)
                )
            )
        )
        == 1
    )


def test_time_first_is_warned_of() -> None:
    """Padded sequences were cut along time where each tensor had time first.

    Nothing disagreed.
    """

    def collate(batch: Any) -> Any:
        inputs, marks = zip(*batch, strict=True)
        return pad_sequence(inputs), pad_sequence(marks)

    samples: Any = [(torch.zeros(5 + i, 2), torch.zeros(5 + i)) for i in range(4)]
    source = DataLoader(samples, batch_size=4, collate_fn=collate)
    with pytest.warns(
        UserWarning,
        match=r"8 items along its first.*4 along its second.*batch_first=True",
    ):
        list(central(2).experimental_distribute_dataset(source))
    with pytest.raises(ValueError, match=r"pad_sequence\(\.\.\., batch_first=True\)"):
        dealt = {"x": torch.zeros(8, 4, 2), "lengths": torch.tensor([5, 6, 7, 8])}
        list(central(2).experimental_distribute_dataset([dealt]))


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "a noisy and a clean column": lambda x: (x, x + 1),
    "as many alike columns as samples": lambda x: (x, x, x, x),
    "levels of a pyramid": lambda x: (
        [x.expand(4, 3, 8), x.expand(4, 3, 4), x.expand(4, 3, 2)],
        x[:, 0],
    ),
    "several crops": lambda x: (torch.cat([x, x]), torch.cat([x, x])),
    "a dict of columns": lambda x: {"a": x, "b": x, "c": (x, x)},
    "sequences of unlike length": lambda x: (x.expand(4, 3, 7), x.expand(4, 3, 9)),
    "numbers": lambda x: (x, [1, 2, 3, 4]),
    "a tuple of numbers": lambda x: (x, (1, 2, 3, 4)),
    "strings": lambda x: (x, ("a", "b", "c", "d")),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_dealt_without_a_word(name: str) -> None:
    samples: Any = [torch.full((1, 1), float(i)) for i in range(6)]

    def collate(batch: Any) -> Any:
        x = torch.stack(batch)
        return COLUMNS[name](x) if len(x) == 4 else (x,)

    source = DataLoader(samples, batch_size=4, collate_fn=collate, drop_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(central(2).experimental_distribute_dataset(source))) == 1


def test_a_last_batch_of_one_row_is_no_list_of_samples() -> None:
    samples: Any = [torch.zeros(2) for _ in range(5)]
    source = DataLoader(
        samples,
        batch_size=2,
        collate_fn=lambda batch: (torch.stack(batch), torch.stack(batch) + 1),
    )
    assert len(list(central(2).experimental_distribute_dataset(source))) == 3
